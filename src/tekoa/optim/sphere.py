"""Sphere: an optimizer that keeps every kernel on the scale the model gives it.

A hidden kernel takes steps of a fixed size relative to its scale and is rescaled to that
scale after each of them, so that neither a learning rate nor a weight decay is needed, and
the initial size of the weights does not matter. Directions are those of Adam, orthogonalised
for hidden kernels. Output kernels take twice these steps without the rescaling: the size of
logits and targets is for the data to say. Scales, roles and the depth of the model come from a
`ScaleTable`; the size of a step follows from the depth and from the number of steps.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tekoa.core import trees
from tekoa.optim import orthogonal, restart
from tekoa.optim.amos import slots, transform
from tekoa.optim.scales import auto
from tekoa.optim.scales.table import ScaleRow, ScaleTable

Tail = Literal["cosine", "linear", "constant"]

_FLOOR = 2**-125  # Of second moments, so that a gradient of 0 gives an update of 0.


@dataclasses.dataclass(frozen=True, kw_only=True)
class SphereRule:
    """The constants of sphere, which were chosen once and for all models.

    Attributes:
        b1: Decay of the running mean of gradients.
        b2: Decay of the running mean of squared gradients.
        is_reduced: Whether second moments are averaged over the axes that the table's slots
            share, which halves the memory of the optimizer.
        nesterov: Whether the direction includes the current gradient as the next step's mean
            of gradients will, as in NAdam.
        output_factor: Factor on the steps of kernels and biases at the output.
        min_rms: Lower bound of the rms that the steps of a kernel are divided by. The ratio of
            moments of pure noise has an rms of about 0.23; much less means that most entries
            have no gradient, and dividing would enlarge the steps of the few others.
        full_depth: Number of kernels in a row up to which hidden parameters take full steps. In
            deeper models, where every layer changes what the next ones see, they are smaller.
        branch_factor: Factor on the steps of kernels in residual branches, each of which changes
            only a part of what the next ones see.
        branch_depth_power: Power of full_depth / depth for the same kernels; 0 for none.
        table_depth_power: The same for tables that are looked up, whose rows are summands too.
        recurrent_start: Kernels that are applied to their own results start no larger than this
            part of their scale, and are free: on it, gradients might grow through time. 0: not so.
        n_iterations: Of the orthogonalisation of hidden kernels' steps; 0 for none.
        max_side: Kernels are orthogonalised in blocks of at most so many rows or columns.

    Raises:
        ValueError: If a decay is not in [0, 1), or a number of the orthogonalisation negative.
    """

    b1: float = 0.9
    b2: float = 0.99
    is_reduced: bool = False
    nesterov: bool = True
    output_factor: float = 2.0
    min_rms: float = 0.2
    full_depth: float = 5.0
    branch_factor: float = 1.4
    branch_depth_power: float = 0.0
    table_depth_power: float = 0.5
    recurrent_start: float = 0.5
    n_iterations: int = 3
    max_side: int = 64

    def __post_init__(self) -> None:
        for name in ("b1", "b2"):
            transform.check_range(name, getattr(self, name), 0, 1)
        if self.n_iterations < 0 or self.max_side < 1:
            raise ValueError(
                "n_iterations must be 0 or more and max_side positive, got "
                f"{self.n_iterations} and {self.max_side}."
            )

    def scale(self, row: ScaleRow) -> Any:
        """Returns the scale of a parameter: a number, or an array if its slices differ.

        The ends of n residual branches have 1/n of theirs, so that together the branches are as
        large as the stream that they are added to.
        """
        eta = row.eta if row.eta_by_slice is None else row.eta_by_slice
        return eta / row.n_branches

    def start(self, row: ScaleRow) -> float:
        """Returns the part of its scale at which a free kernel starts at most; 0: it is kept."""
        return 1.0 if row.role.is_output else self.recurrent_start * row.role.is_recurrent

    def factor(self, row: ScaleRow, table: ScaleTable) -> float:
        """Returns the factor on the steps of a parameter."""
        if row.role.is_output:
            return self.output_factor
        share = min(1.0, self.full_depth / max(table.depth, 1))
        if row.role.is_kernel and row.in_branch:
            return self.branch_factor * share**self.branch_depth_power
        return share**self.table_depth_power if row.role.kind == "looked up" else share

    def is_divided(self, row: ScaleRow) -> bool:
        """Whether the direction of a parameter's step is divided by its rms."""
        if row.role.kind in ("added", "placed"):
            # Divided by its own size, a single number would keep only the sign of its step.
            return any(row.shape[i] > 1 for i in _own_axes(row))
        return row.role.is_kernel

    def is_orthogonal(self, row: ScaleRow) -> bool:
        """Whether the direction of a parameter's step is orthogonalised."""
        return self.n_iterations > 0 and orthogonal.is_matrix(row.role)

    def to_scale(self, u: jax.Array, row: ScaleRow, table: ScaleTable) -> jax.Array:
        """Rescales the direction of a step to the parameter's scale."""
        size = jnp.asarray(self.scale(row) * self.factor(row, table), u.dtype)
        if self.is_orthogonal(row):
            return size * orthogonal.orthogonalise(
                u, row.role, n_iterations=self.n_iterations, max_side=self.max_side
            )
        if not self.is_divided(row):
            return size * u
        return u * (size / jnp.maximum(_rms(u, _own_axes(row)), max(self.min_rms, _FLOOR)))


# The version of these rules. A run stores it, and is only resumed with the same.
RULES_VERSION = 6


class ProjectToSphereState(NamedTuple):
    """The state of `project_to_sphere` between steps."""

    count: Any  # Completed updates, an int32 array.


class ScaleBySphereState(NamedTuple):
    """The state of `scale_by_sphere` between steps."""

    count: Any  # Completed updates, an int32 array.
    mu: trees.PyTree  # Running mean of gradients.
    nu: trees.PyTree  # Running mean of squared gradients, in the slots' shapes.


def sphere(
    table: ScaleTable,
    *,
    n_steps: int | None = None,
    c: float = 0.5,
    warmup: float = 0.05,
    tail: Tail = "linear",
    learning_rate: optax.ScalarOrSchedule | None = None,
    **settings: Any,
) -> optax.GradientTransformation:
    """Creates the sphere optimizer for the model that a table of scales was found for.

    Args:
        table: Scales and roles, from `tekoa.find_scales` or `tekoa.scales`.
        n_steps: The number of steps of the training run.
        c: Size of the largest step, relative to the scale, times sqrt(n_steps).
        warmup: Fraction of the steps over which the size grows from 0.
        tail: How the size decreases to 0 afterwards, or "constant".
        learning_rate: Relative size of a step, a number or a schedule, in place of the one
            that follows from `n_steps`, `c`, `warmup` and `tail`.
        **settings: Fields of `SphereRule` that differ from its defaults.

    Returns:
        A transformation whose `update` needs `params`.

    Raises:
        ValueError: If a number is out of range, or both `n_steps` and `learning_rate` are
            None.

    >>> from tekoa.optim.scales.auto import scales_of_function
    >>> params = {'w': jnp.ones((100, 10)), 'v': jnp.ones((10, 1))}
    >>> fn = lambda p, x: jax.nn.relu(x @ p['w']) @ p['v']
    >>> tx = sphere(scales_of_function(fn, params, jnp.ones((8, 100))), n_steps=1000)
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> params = optax.apply_updates(params, updates)
    >>> round(float(jnp.sqrt(jnp.mean(params['w'] ** 2))), 4)  # 100 ** -1/2, no longer 1.
    0.1
    """
    if learning_rate is None:
        learning_rate = step_size(n_steps, c=c, warmup=warmup, tail=tail)
    return optax.chain(
        # The first step rescales the kernels, so that gradients taken before have another size.
        restart.restart_after_first(scale_by_sphere(table, **settings)),
        optax.scale_by_learning_rate(learning_rate),
        project_to_sphere(table, **settings),
    )


def auto_for(
    fn: Callable[..., Any],
    params: trees.PyTree,
    *batch: Any,
    n_steps: int | None = None,
    **settings: Any,
) -> optax.GradientTransformation:
    """Creates an optimizer for a loss function, without any settings.

    Args:
        fn: `fn(params, *batch)` returns the loss.
        params: The parameters to train, or their shapes.
        *batch: The other arguments of `fn` for one batch: arrays, shapes or keys.
        n_steps: The number of steps of the training run; None if it is not known.
        **settings: Arguments of `sphere` that differ from its defaults.

    Returns:
        `sphere` for the scales and roles found. If `n_steps` is None, the size of its steps
        decreases with the square root of the step's number.

    Raises:
        ValueError: For the reasons of `sphere` and `tekoa.scales`.

    >>> params = {'w': jnp.ones((100, 10)), 'v': jnp.ones((10, 1))}
    >>> loss = lambda p, x, y: jnp.mean((jax.nn.relu(x @ p['w']) @ p['v'] - y) ** 2)
    >>> batch = jnp.ones((8, 100)), jnp.zeros((8, 1))
    >>> tx = auto_for(loss, params, *batch, n_steps=1000)
    >>> updates, state = tx.update(jax.grad(loss)(params, *batch), tx.init(params), params)
    """
    table = auto.scales_of_function(fn, params, *batch)
    return auto_sphere(table, n_steps=n_steps, **settings)


def auto_sphere(
    table: ScaleTable, *, n_steps: int | None = None, **settings: Any
) -> optax.GradientTransformation:
    """Creates `sphere` for a known or, if `n_steps` is None, unknown number of steps."""
    if n_steps is None:
        settings = {"learning_rate": anytime_step_size(settings.pop("c", 0.5)), **settings}
    return sphere(table, n_steps=n_steps, **settings)


def anytime_step_size(c: float = 0.5, n_warmup: int = 100) -> optax.Schedule:
    """Returns the relative size of a step if the number of steps is not known.

    It is that of the middle of a run of twice the current length.

    >>> size = anytime_step_size()
    >>> [round(float(size(i)), 4) for i in (0, 99, 9999)]
    [0.0002, 0.0177, 0.0018]
    """

    def size(count: Any) -> jax.Array:
        done = jnp.asarray(count + 1, jnp.float32)
        rise = jnp.minimum(1.0, done / n_warmup)
        return 0.5 * c * rise / jnp.sqrt(2 * jnp.maximum(done, n_warmup))

    return size


def step_size(
    n_steps: int | None, *, c: float = 0.5, warmup: float = 0.05, tail: Tail = "linear"
) -> optax.Schedule:
    """Returns the relative size of a step as a schedule; arguments are those of `sphere`.

    >>> size = step_size(100, c=1.0, warmup=0.1)
    >>> [round(float(size(i)), 3) for i in (0, 9, 99, 100)]
    [0.01, 0.1, 0.001, 0.0]
    """
    if n_steps is None or not n_steps > 0:
        raise ValueError(
            f"The number of steps must be positive, got {n_steps!r}. Pass n_steps=, the length of "
            "the training run, or a learning_rate."
        )
    if not c > 0 or not 0 <= warmup < 1:
        raise ValueError(f"c must be positive and warmup in [0, 1), got {c} and {warmup}.")
    if tail not in _TAILS:
        raise ValueError(f"tail must be one of {sorted(_TAILS)}, got {tail!r}.")
    n_warmup = math.ceil(warmup * n_steps)
    peak, decay = c / math.sqrt(n_steps), _TAILS[tail]

    def size(count: Any) -> jax.Array:
        rise = jnp.minimum(1.0, (count + 1) / max(n_warmup, 1))
        progress = jnp.clip((count + 1 - n_warmup) / (n_steps + 1 - n_warmup), 0.0, 1.0)
        return peak * rise * decay(progress)

    return size


_TAILS = {
    "cosine": lambda progress: 0.5 * (1 + jnp.cos(jnp.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
}


def scale_by_sphere(table: ScaleTable, **settings: Any) -> optax.GradientTransformation:
    """Creates the first part of `sphere`: updates of the parameters' own scales.

    The update of a kernel has the rms of its scale, and is orthogonalised if the kernel is
    hidden; that of a gain is its scale times a ratio of moments, as in Adam. Multiply the
    result by minus a relative step size, and finish with `project_to_sphere`. Arguments are
    those of `sphere`.
    """
    rule = SphereRule(**settings)
    b1, b2 = rule.b1, rule.b2
    shape_fn = table.shape_fn if rule.is_reduced else None

    def init(params: trees.PyTree) -> ScaleBySphereState:
        def square(name: trees.Name, param: Any) -> jax.Array:
            row = table.row(name, jnp.shape(param))
            transform.record_scale(name, rule.scale(row))
            shape = slots.slot_shape_of(shape_fn, name, jnp.shape(param))
            return jnp.zeros_like(param, transform.compute_dtype(param), shape)

        mu = jax.tree.map(lambda p: jnp.zeros_like(p, transform.compute_dtype(p)), params)
        nu = trees.map_named(square, params)
        return ScaleBySphereState(count=jnp.zeros((), jnp.int32), mu=mu, nu=nu)

    def update(
        updates: trees.PyTree, state: Any, params: trees.PyTree | None = None
    ) -> tuple[trees.PyTree, ScaleBySphereState]:
        del params
        count: Any = optax.safe_increment(state.count)
        unbias1, unbias2 = (1 - jnp.asarray(b, jnp.float32) ** count for b in (b1, b2))
        unbias_next = 1 - jnp.asarray(b1, jnp.float32) ** (count + 1)

        def update_param(name: trees.Name, mu: jax.Array, nu: jax.Array, g: Any) -> Any:
            if g is None:
                return None, mu, nu
            grad = jnp.asarray(g, mu.dtype)
            mu = b1 * mu + (1 - b1) * grad
            nu = b2 * nu + (1 - b2) * slots.mean_of_squares(grad, nu.shape)
            mean = (b1 * mu + (1 - b1) * grad) / unbias_next if rule.nesterov else mu / unbias1
            u = mean * jax.lax.rsqrt(jnp.maximum(nu / unbias2, _FLOOR))
            step = rule.to_scale(u, table.row(name, u.shape), table)
            return step.astype(jnp.result_type(g)), mu, nu

        columns = _map_columns(3, update_param, state.mu, state.nu, updates)
        return columns[0], ScaleBySphereState(count, *columns[1:])

    return optax.GradientTransformation(init, update)


def project_to_sphere(table: ScaleTable, **settings: Any) -> optax.GradientTransformation:
    """Creates the last part of `sphere`: hidden kernels end each step on their scale.

    The incoming updates already include the sign. Each copy of a kernel, such as a layer of
    a stack, is rescaled separately. Kernels of outputs and recurrences are only reduced by the
    first step if they are larger than they should start. Arguments are those of `sphere`.
    """
    rule = SphereRule(**settings)

    def init(params: trees.PyTree) -> ProjectToSphereState:
        del params
        return ProjectToSphereState(count=jnp.zeros((), jnp.int32))

    def update(
        updates: trees.PyTree, state: Any, params: trees.PyTree | None = None
    ) -> tuple[trees.PyTree, ProjectToSphereState]:
        if params is None:
            raise ValueError("Sphere needs params: call update(grads, state, params).")
        is_first = state.count == 0

        def project(name: trees.Name, param: Any, delta: Any) -> Any:
            row = table.row(name, jnp.shape(param))
            if delta is None or not has_radius(row):
                return delta
            dtype = transform.compute_dtype(param)
            moved = jnp.asarray(param, dtype) + jnp.asarray(delta, dtype)
            rms = _rms(moved, _own_axes(row))
            eta = jnp.asarray(rule.scale(row), dtype)
            factor = jnp.where(rms > 0, eta / jnp.where(rms > 0, rms, 1), 1)
            if start := rule.start(row):
                factor = jnp.where(is_first, jnp.minimum(start * factor, 1), 1)
            return (moved * factor - jnp.asarray(param, dtype)).astype(jnp.result_type(delta))

        projected = _map_columns(1, lambda *leaf: (project(*leaf),), params, updates)[0]
        return projected, ProjectToSphereState(optax.safe_increment(state.count))

    return optax.GradientTransformation(init, update)


def has_radius(row: ScaleRow) -> bool:
    """Whether a parameter is rescaled: not low-rank factors, as an adapter must start at 0."""
    return row.role.kind in ("contracted", "looked up")


def _own_axes(row: ScaleRow) -> tuple[int, ...]:
    """Returns the axes of one copy of a kernel."""
    return tuple(i for i in range(len(row.shape)) if i not in row.role.batched)


def _rms(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))


def _map_columns(
    n_columns: int, fn: Any, tree: trees.PyTree, *rest: trees.PyTree
) -> list[trees.PyTree]:
    """Applies `fn(name, *leaves)`, which returns a tuple, and returns one tree per entry."""
    leaves, treedef = jax.tree.flatten(tree)
    others = [treedef.flatten_up_to(other) for other in rest]
    rows = [fn(*row) for row in zip(trees.leaf_names(tree), leaves, *others, strict=True)]
    columns = zip(*rows, strict=True) if rows else [()] * n_columns
    return [treedef.unflatten(column) for column in columns]
