"""Evaluator: keeps the results of all batches and scores them in the end."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

ProcFn = Callable[[Any], Iterable[Any]]
EvalFn = Callable[[Sequence[Any], Sequence[Any]], Any]


class EvaluatorLike(Protocol):
    """What `get_evaluator` gives."""

    def reset_states(self) -> None:
        """Forgets all results; called before each evaluation."""
        ...

    def update_state(self, gold: Any, infer: Any) -> None:
        """Takes what is right, and the results, of one batch."""
        ...

    def result(self) -> Mapping[str, Any]:
        """Gives the metrics of all batches."""
        ...


class Evaluator:
    """Scores results against what is right, by any number of metrics.

    Args:
        metrics: Name to `(proc_fn, eval_fn)`: `proc_fn(results)` gives one value per row of a
            batch, `eval_fn(gold, values)` the score over all rows.

    >>> evaluator = Evaluator({'is_right': (list, lambda gold, found: gold == found)})
    >>> evaluator.reset_states()
    >>> evaluator.update_state([1, 2], [1, 2])
    >>> evaluator.update_state([3], [3])
    >>> evaluator.result()
    {'is_right': True}
    """

    def __init__(self, metrics: Mapping[str, tuple[ProcFn, EvalFn]]):
        self._metrics = dict(metrics)
        self.reset_states()

    def reset_states(self) -> None:
        """Forgets all results."""
        self._gold: list[Any] = []
        self._values: dict[str, list[Any]] = {name: [] for name in self._metrics}

    def update_state(self, gold: Any, infer: Any) -> None:
        """Takes what is right, and the results, of one batch."""
        self._gold.extend(gold)
        for name, (proc_fn, _) in self._metrics.items():
            self._values[name].extend(proc_fn(infer))

    def result(self) -> dict[str, Any]:
        """Gives the score of each metric.

        Raises:
            ValueError: If a metric has not one value for each row.
        """
        for name, values in self._values.items():
            if len(values) != len(self._gold):
                raise ValueError(
                    f"Metric {name!r} has {len(values)} values for {len(self._gold)} examples: its "
                    "proc_fn must give one for each row of a batch."
                )
        return {
            name: eval_fn(self._gold, self._values[name])
            for name, (_, eval_fn) in self._metrics.items()
        }
