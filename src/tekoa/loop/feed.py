"""The data of a training loop: batches one by one, checked, with a position to resume from."""

import dataclasses
import logging
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tekoa import hosts
from tekoa.core import batch as batches
from tekoa.core import objective, trees
from tekoa.data import interop

_log = logging.getLogger("tekoa")


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """Structure, shapes and dtypes of batches; there is one object for equal ones.

    Attributes:
        key: Structure, shapes and dtypes, to compare.
        sizes: Rows and tokens of a batch over all processes, as in `Checkpoint.setup`.
    """

    key: Any
    sizes: dict[str, int]


class BatchFeed:
    """Reads batches from any iterable and keeps track of the data position, if there is one.

    A tekoa dataset, a grain iterator and a sequence have a position. For anything else,
    `state` is None.

    Args:
        data: The batches.
        split: Splits a batch into inputs and targets; only used to check batches.
        report: Called with a line when shapes change that were expected to; others are warnings.

    Attributes:
        has_one_shape: Whether the shapes of batches are not expected to change.
    """

    def __init__(
        self,
        data: Iterable[Any],
        split: objective.Split = batches.split_batch,
        report: Callable[[str], object] = _log.info,
    ):
        self._iterator = interop.iterate(data)
        self._split, self._report = split, report
        self.has_one_shape: bool = getattr(self._iterator, "has_one_shape", True)
        self._form: Form | None = None
        self._forms: list[Form] = []
        self._last: Any = None
        self._peeked: list[Any] = []

    def peek(self) -> Any:
        """Returns the next batch without consuming it.

        Raises:
            ValueError: If there is none.
        """
        if not self._peeked:
            self._state_before_peek = self.state
            try:
                self._peeked.append(next(self._iterator))
            except StopIteration:
                raise ValueError(
                    "The data is empty: it yielded no batches. A generator can be read only once; "
                    "a loader may drop a last batch that is short, even the only one."
                ) from None
            self._check(self._peeked[0])
        return self._peeked[0]

    def next(self) -> Any:
        """Returns the next batch; logs a warning if shapes or dtypes are new.

        Raises:
            StopIteration: If the data has ended.
            TypeError: If the structure differs from that of the first batch, or a leaf is not
                an array.
        """
        batch = self._peeked.pop() if self._peeked else next(self._iterator)
        self._check(batch)
        return batch

    def _check(self, batch: Any) -> None:
        leaves, structure = jax.tree.flatten(batch)
        key = structure, [(getattr(x, "shape", ()), getattr(x, "dtype", None)) for x in leaves]
        if self._form is not None and key == self._form.key:
            return
        form = next((form for form in self._forms if form.key == key), None)
        if form is None:
            form = self._new_form(key, batch)
            self._forms.append(form)
        self._form, self._last = form, batch

    def _new_form(self, key: Any, batch: Any) -> Form:
        inputs, _ = self._split(batch)
        batches.check_arrays(batch)
        if self._form is not None:
            before, after = batches.describe(self._last), batches.describe(batch)
            if key[0] != self._form.key[0]:
                raise TypeError(
                    f"The structure of the batches changed from {before} to {after}. All batches "
                    "of a run must have the same structure."
                )
            report = _log.warning if self.has_one_shape else self._report
            report(f"Batch changed from {before} to {after}; recompiling the step.")
        n_rows = hosts.current().count * batches.n_rows(inputs)
        n_tokens = n_rows * (batches.n_tokens_per_row(inputs) or 0)
        return Form(key, {"n_rows": n_rows, "n_tokens": n_tokens})

    def nonfinite_entries(self) -> str:
        """Returns which entries of the next batch have NaN or Inf, and the first row of each."""
        parts = dict(zip(("inputs", "targets"), self._split(self.peek()), strict=True))
        texts = []
        for name, leaf in trees.named_leaves(parts).items():
            values = np.asarray(leaf)
            if jnp.issubdtype(values.dtype, jnp.inexact) and not np.isfinite(values).all():
                bad = np.argwhere(~np.isfinite(values))
                where = f" from row {bad[0][0]} on" if values.ndim else ""
                texts.append(f"{'/'.join(name).removesuffix('/0')}{where}")
        return ", ".join(texts)

    @property
    def form(self) -> Form:
        """The form of the last batch; the same object for equal forms."""
        if self._form is None:
            self.peek()
        assert self._form is not None
        return self._form

    @property
    def state(self) -> Any:
        """The position after the last batch returned, as JSON-able data, or None."""
        return self._state_before_peek if self._peeked else interop.position(self._iterator)

    def restore(self, state: Any, *, then: int = 0) -> None:
        """Moves to a saved position; logs a warning if the data has no positions.

        Args:
            state: A value of `state`.
            then: Number of batches to skip after that position.
        """
        if state is not None and interop.go_to(self._iterator, state):
            self._peeked.clear()
            for _ in range(then):
                next(self._iterator)
            return
        _log.warning(
            "Cannot restore the data position (%s): training continues with the batches that the "
            "data yields now. Lists, tekoa datasets and grain iterators can be resumed.",
            type(self._iterator).__name__,
        )
