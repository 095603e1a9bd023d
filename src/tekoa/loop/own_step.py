"""The training of a task that has its own step: `TrainTask(step=, init=, data=)`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tekoa.core import batch as batches
from tekoa.core import metrics, nonfinite, objective, trees
from tekoa.core import step as steps
from tekoa.core.model import LogicalAxes, cast_like
from tekoa.core.state import StepOutput, TrainState
from tekoa.core.trees import PyTree
from tekoa.loop.task import Options, TrainTask

# The collection of arrays that are not floating point numbers: counters, random keys.
_OTHERS = "others"


class StepTraining:
    """A `Training` around two functions of the user.

    The user's state is any tree: dicts, optimizer states, NNX or Equinox modules. Its floating
    point arrays become the `params` of the `TrainState`, other arrays its `variables`, both by
    name; what is not an array, such as an activation function, is stored separately.

    Args:
        task: Has `step`, `init` and `data`.
    """

    reported: Sequence[str] = ("loss",)

    def __init__(self, task: TrainTask):
        self._init: Any = task.init
        self._step: Any = task.step
        self.data: Iterable[Any] = task.data
        self._split: objective.Split = task.split
        self._form: Any = None
        self._statics: dict[trees.Name, Any] = {}

    def split(self, batch: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Separates inputs from targets, as far as that is known; only to count rows."""
        is_pair = isinstance(batch, Mapping) or (isinstance(batch, tuple) and len(batch) == 2)
        return self._split(batch) if is_pair else ((batch,), ())

    def axes(self, rng: jax.Array, batch: Any) -> LogicalAxes:
        del rng, batch
        return {}

    def init(self, rng: jax.Array, batch: Any, options: Options) -> TrainState:
        _check_options(options)
        init_rng, state_rng = jax.random.split(rng)
        tree = self._init(init_rng, batch)
        params, others = self._separate(tree)
        variables = {_OTHERS: others} if others else {}
        state = TrainState.of_parts(params, variables=variables, rng=state_rng)
        _, values = jax.eval_shape(self._run, state, batch)
        return jax.tree.map(steps.donatable_copy, state.replace(sums=metrics.zeros(values)))

    def _separate(self, tree: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the floating point arrays and the other arrays, as nested dicts."""
        leaves = trees.named_leaves(tree)
        arrays = {name: x for name, x in leaves.items() if _is_array(x)}
        self._statics = {name: x for name, x in leaves.items() if name not in arrays}
        self._form = jax.tree.structure(tree)
        floats = {n: x for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
        if not floats:
            raise TypeError(
                f"init must return a state with floating point arrays, got {list(leaves)[:8]}."
            )
        others = {name: x for name, x in arrays.items() if name not in floats}
        return trees.nest(floats), trees.nest(others)

    def merge(self, params: PyTree, variables: Mapping[str, PyTree]) -> PyTree:
        """Returns the arrays in the structure of the user's state."""
        named = {
            **trees.named_leaves(params),
            **trees.named_leaves(variables.get(_OTHERS, {})),
            **self._statics,
        }
        names = trees.leaf_names(jax.tree.unflatten(self._form, range(self._form.num_leaves)))
        return jax.tree.unflatten(self._form, [named[name] for name in names])

    def make_step(self, options: Options, *, keep_grads: bool = False) -> steps.Step:
        if keep_grads:
            raise ValueError("grads=True needs Tekoa's step; TrainTask(step=) has its own.")

        def step(state: TrainState, batch: Any) -> tuple[TrainState, StepOutput]:
            (params, others), values = self._run(state, batch)
            params = cast_like(state.params, params, "state")
            if others:
                others = cast_like(state.variables[_OTHERS], others, "state")
            loss = jnp.asarray(values.get("loss", next(iter(values.values()))).compute())
            new = state.replace(
                step=state.step + 1,
                params=params,
                variables={_OTHERS: others} if others else {},
                sums=metrics.merge(state.sums, values),
            )
            are_finite = trees.are_finite(params)
            new = nonfinite.select_finite(
                state,
                new,
                value=loss,
                grads=[jnp.ones((), bool)] * len(are_finite),
                params=are_finite,
                on_nan=options.on_nan,
            )
            return new, StepOutput(loss=loss)

        return step

    def _run(self, state: TrainState, batch: Any) -> Any:
        """Calls the user's step; returns the parts of its state, and its metrics."""
        rng = jax.random.fold_in(state.rng, state.step)
        result = self._step(self.merge(state.params, state.variables), batch, rng)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                "step(state, batch, rng) must return the new state and a dict of metrics, got "
                f"{type(result).__name__}."
            )
        tree, values = result
        values = values if isinstance(values, Mapping) else {"loss": values}
        if not values:
            raise ValueError("step must return at least one metric, such as {'loss': loss}.")
        form = self._form
        if jax.tree.structure(tree) != form:
            raise ValueError(
                f"step must return a state of the structure that init returned, {form}, got "
                f"{jax.tree.structure(tree)}."
            )
        n_rows = batches.n_rows(batch)
        means = {k: metrics.as_mean(x, n_rows, f"Metric {k!r}") for k, x in values.items()}
        return self._separate(tree), means

    def empty(self, sums: PyTree) -> PyTree:
        return metrics.zeros(sums)

    def compute(self, sums: PyTree) -> dict[str, float]:
        return metrics.compute(sums)


def _is_array(x: Any) -> bool:
    return hasattr(x, "dtype") and hasattr(x, "shape")


def _check_options(options: Options) -> None:
    for name in ("accumulate", "ema", "precision"):
        if getattr(options, name) != getattr(Options(), name):
            raise ValueError(
                f"{name}= changes Tekoa's step, but TrainTask(step=) has its own: do it there."
            )
