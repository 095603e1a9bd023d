"""Muon with its axes from the model, and sphere for all other parameters.

Muon orthogonalises the update of a matrix, so it must know which axes of a kernel form the
rows and which the columns. The roles of a `ScaleTable` say so for every kernel.
"""

import dataclasses
from typing import Any

import optax
import optax.contrib

from tekoa.core import trees
from tekoa.optim import orthogonal, restart, sphere
from tekoa.optim.amos import transform
from tekoa.optim.scales.table import ScaleTable


def muon_for(
    table: ScaleTable,
    *,
    n_steps: int | None = None,
    c: float = 0.5,
    beta: float = 0.95,
    learning_rate: optax.ScalarOrSchedule | None = None,
    **settings: Any,
) -> optax.GradientTransformation:
    """Creates Muon for the model that a table of scales was found for.

    Hidden kernels that are matrices take the orthogonalised steps of `optax.contrib.muon`;
    embeddings, outputs, biases and gains take those of `sphere`. The size of the steps and
    the rescaling of hidden kernels are those of `sphere` for both.

    Args:
        table: Scales and roles, from `tekoa.find_scales` or `tekoa.scales`.
        n_steps: The number of steps of the training run.
        c: Size of the largest step, relative to the scale, times sqrt(n_steps).
        beta: Decay of Muon's running mean of gradients.
        learning_rate: Relative size of a step, a number or a schedule, instead of `n_steps`.
        **settings: Other arguments of `sphere`.

    Returns:
        A transformation whose `update` needs `params`.

    Raises:
        ValueError: For the reasons of `sphere`.

    >>> import jax, jax.numpy as jnp
    >>> from tekoa.optim.scales.auto import scales_of_function
    >>> params = {'w': jnp.ones((9, 4)), 'v': jnp.ones((4, 1))}
    >>> fn = lambda p, x: jax.nn.relu(x @ p['w']) @ p['v']
    >>> tx = muon_for(scales_of_function(fn, params, jnp.ones((8, 9))), n_steps=100)
    >>> updates, state = tx.update(params, tx.init(params), params)
    """
    # The depth counts as in the rules with which it was measured.
    measured = {"branch_factor": 1.0, "branch_depth_power": 0.5, "table_depth_power": 1.0}
    settings = {**measured, **settings}
    schedule = {name: settings.pop(name) for name in ("warmup", "tail") if name in settings}
    if learning_rate is None:
        learning_rate = sphere.step_size(n_steps, c=c, **schedule)
    rule = sphere.SphereRule(**settings)
    # Orthogonalised directions are dense, so that their rms needs no bound.
    unbounded = dataclasses.replace(rule, min_rms=0.0, n_iterations=0)
    by_muon = optax.chain(
        transform.in_float32(
            optax.contrib.scale_by_muon(
                beta=beta, weight_dimension_numbers=lambda params: dimension_numbers(table, params)
            )
        ),
        optax.stateless(lambda updates, _: _to_scale(unbounded, table, updates)),
    )

    def labels(params: trees.PyTree) -> trees.PyTree:
        return trees.map_named(
            lambda name, x: orthogonal.is_matrix(table.row(name, x.shape).role), params
        )

    direction = optax.partition(
        {True: by_muon, False: sphere.scale_by_sphere(table, **settings)}, labels
    )
    return optax.chain(
        restart.restart_after_first(direction),
        optax.scale_by_learning_rate(learning_rate),
        sphere.project_to_sphere(table, **settings),
    )


def _to_scale(rule: sphere.SphereRule, table: ScaleTable, updates: trees.PyTree) -> trees.PyTree:
    return trees.map_named(
        lambda name, u: rule.to_scale(u, table.row(name, u.shape), table), updates
    )


def dimension_numbers(table: ScaleTable, params: trees.PyTree) -> trees.PyTree:
    """Returns the rows and columns of every matrix, as `optax.contrib.muon` expects them.

    Entries are None for parameters that are no matrices. Pass it to `optax.contrib.muon` as
    `muon_weight_dimension_numbers=functools.partial(dimension_numbers, table)` to use Muon
    with a learning rate of your own.
    """

    def numbers(name: trees.Name, param: Any) -> Any:
        role = table.row(name, param.shape).role
        if not orthogonal.is_matrix(role):
            return None
        return optax.contrib.MuonDimensionNumbers(role.contracted, role.free)

    return trees.map_named(numbers, params)
