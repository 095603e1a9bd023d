"""Mean metrics, evaluators and predictors for model files in the long form."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import jax
import jax.numpy as jnp
from flax import linen as nn

from tekoa.core import files

ProcFn = Callable[[Any], Iterable[Any]]
EvalFn = Callable[[Sequence[Any], Sequence[Any]], Any]


class MeanMetrics(nn.Module):
    """A Linen module that accumulates means, in the collection "metrics".

    Attributes:
        names: Names of the metrics.

    >>> metrics_mod = MeanMetrics.create('train_loss')
    >>> metrics = metrics_mod.init(jax.random.key(0))
    >>> _, metrics = metrics_mod.apply(
    ...     metrics, 'train_loss', 6.0, 4.0, method=MeanMetrics.update, mutable=['metrics']
    ... )
    >>> metrics_mod.apply(metrics)
    {'train_loss': Array(1.5, dtype=float32)}
    """

    names: tuple[str, ...] = ()

    @classmethod
    def create(cls, *names: str) -> "MeanMetrics":
        """Creates a module with these metrics."""
        return cls(names)

    def setup(self):
        """Creates a total and a count for each name."""
        zero = lambda: jnp.zeros((), jnp.float32)  # noqa: E731
        self._sums = {
            name: [self.variable("metrics", f"{name}_{part}", zero) for part in ("total", "count")]
            for name in self.names
        }

    def __call__(self, name: str | None = None) -> dict[str, jax.Array] | jax.Array:
        """Returns one mean, or all of them by name; 0 for a metric without values."""
        if name is not None:
            return self._mean(name)
        return {name: self._mean(name) for name in self.names}

    def update(self, name: str, dtotal: jax.typing.ArrayLike, dcount: jax.typing.ArrayLike = 1.0):
        """Adds to the total and the count of a metric; returns its mean so far."""
        for variable, increment in zip(self._variables(name), (dtotal, dcount), strict=True):
            variable.value = variable.value + jnp.asarray(increment, jnp.float32)
        return self._mean(name)

    def gathered(self) -> dict[str, jax.Array]:
        """Returns by name whether a metric has any values."""
        return {
            name: (total.value != 0) | (count.value != 0)
            for name, (total, count) in self._sums.items()
        }

    def _mean(self, name: str) -> jax.Array:
        total, count = (variable.value for variable in self._variables(name))
        is_empty = (total == 0) & (count == 0)
        return jnp.where(is_empty, 0.0, total / jnp.where(is_empty, 1.0, count))

    def _variables(self, name: str) -> list[nn.Variable]:
        if name not in self._sums:
            raise ValueError(f"There is no metric {name!r}; there are {', '.join(self.names)}.")
        return self._sums[name]


class Evaluator:
    """Collects the results of all batches and scores them at the end.

    Args:
        metrics: Name to `(proc_fn, eval_fn)`: `proc_fn(results)` returns one value per row of a
            batch, `eval_fn(gold, values)` the score over all rows.

    >>> evaluator = Evaluator({'is_equal': (list, lambda gold, values: gold == values)})
    >>> evaluator.reset_states()
    >>> evaluator.update_state([1, 2], [1, 2])
    >>> evaluator.update_state([3], [3])
    >>> evaluator.result()
    {'is_equal': True}
    """

    def __init__(self, metrics: Mapping[str, tuple[ProcFn, EvalFn]]):
        self._metrics = dict(metrics)
        self.reset_states()

    def reset_states(self) -> None:
        """Drops all results; called before each evaluation."""
        self._gold: list[Any] = []
        self._values: dict[str, list[Any]] = {name: [] for name in self._metrics}

    def update_state(self, gold: Any, infer: Any) -> None:
        """Adds the expected values and the results of one batch."""
        self._gold.extend(gold)
        for name, (proc_fn, _) in self._metrics.items():
            self._values[name].extend(proc_fn(infer))

    def result(self) -> dict[str, Any]:
        """Returns the score of each metric.

        Raises:
            ValueError: If a metric does not have one value per row.
        """
        for name, values in self._values.items():
            if len(values) != len(self._gold):
                raise ValueError(
                    f"Metric {name!r} has {len(values)} values for {len(self._gold)} examples: its "
                    "proc_fn must return one value per row of a batch."
                )
        return {
            name: eval_fn(self._gold, self._values[name])
            for name, (_, eval_fn) in self._metrics.items()
        }


class Predictor:
    """Writes one line per result.

    Args:
        proc_fn: `proc_fn(results)` returns what to write for each row of a batch.
        output_path: File to write; it appears under this name once it is complete. None: standard
            output, or the file of `--pred_output`.
        pre_str: A line before all others.
        post_str: A line after all others.

    >>> predictor = Predictor(lambda results: [x + 1 for x in results], post_str='end')
    >>> predictor.consume([1, 2])
    2
    3
    >>> predictor.complete()
    end
    """

    def __init__(
        self,
        proc_fn: ProcFn,
        output_path: str | os.PathLike[str] | None = None,
        pre_str: str | None = None,
        post_str: str | None = None,
    ):
        self._proc_fn = proc_fn
        self.output_path = None if output_path is None else files.local_path(output_path)
        self._header = [] if pre_str is None else [pre_str]  # Emptied once written.
        self._footer = [] if post_str is None else [post_str]
        self._file: TextIO | None = None

    def lines(self, infer: Any) -> Iterator[Any]:
        """Yields what `consume` would write; the first call starts with `pre_str`."""
        while self._header:
            yield self._header.pop()
        yield from self._proc_fn(infer)

    def last_lines(self) -> Iterator[Any]:
        """Yields what `complete` would write."""
        yield from (*self._header, *self._footer)

    def consume(self, infer: Any) -> None:
        """Writes the results of one batch."""
        self._write(self.lines(infer))

    def complete(self) -> None:
        """Writes the last line and closes the file."""
        self._write(self.last_lines())
        if self._file is not None and self.output_path is not None:
            self._file.close()
            os.replace(self._file.name, self.output_path)

    def _write(self, lines: Iterable[Any]) -> None:
        lines = list(lines)  # Computed by every process, written by one.
        if jax.process_index() != 0:
            return
        if self._file is None and self.output_path is not None:
            self.output_path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.output_path.with_name(f"{self.output_path.name}.part").open("w")
        for line in lines:
            print(line, file=self._file)
