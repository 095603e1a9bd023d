"""Targets of text as class numbers, the same for training, validation and prediction."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tekoa.core import messages
from tekoa.data import DataError, Source


def encode_classes(
    source: Source, targets: str | Sequence[str] | None, classes: Sequence[str] | None
) -> tuple[Source, Sequence[str] | None]:
    """Numbers the classes as in the training data; text is replaced by its class number.

    Args:
        source: The examples.
        targets: The name of the target field; several names or None have no classes of text.
        classes: The names of the classes in the training data; found in the source by default.

    Returns:
        The source with class numbers, and the names of the classes if there are any.
    """
    own = source.info.facts.get("classes")
    if own and targets is not None:
        return (source, own) if classes is None else (source.with_classes(classes), classes)
    dtype = source.info.dtypes.get(targets) if isinstance(targets, str) else None
    if dtype is None or dtype.kind not in "OUS":
        return source, classes
    name = str(targets)
    if classes is None:
        names: set[str] = set()
        for batch in source.batches(4096, epochs=1, remainder="keep"):
            names.update(map(str, batch[name]))
        classes = sorted(names)
    return source.map_batch(_ClassNumbers(name, tuple(classes))), classes


@dataclasses.dataclass(frozen=True)
class _ClassNumbers:
    """Replaces the text of a field by its place in a sorted list; can be sent to a process."""

    field: str
    classes: tuple[str, ...]

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        text = np.asarray([str(value) for value in batch[self.field]])
        if unknown := sorted(set(text.tolist()) - set(self.classes)):
            raise DataError(
                f"Field {self.field!r} has the classes {messages.some_of(unknown)}, which the "
                f"training data does not have: {messages.some_of(self.classes)}."
            )
        numbers = np.searchsorted(np.asarray(self.classes), text).astype(np.int32)
        return {**batch, self.field: numbers}
