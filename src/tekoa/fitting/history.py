"""The metrics of a run as a table."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

# Not in tables and pictures unless they are named.
_HIDDEN_GROUPS = ("system/", "gradient_norms/", "update_norms/", "param_norms/")
_HIDDEN = (
    "seconds",
    "train/seconds_per_step",
    "train/gradients_l2norm",
    "train/weights_l2norm",
    "train/last_loss",
    "rates/all",
)


class History:
    """The metrics of each checkpoint.

    Args:
        rows: One dict per checkpoint, with `step` and names such as 'train/loss'.

    >>> history = History([{'step': 10, 'train/loss': 0.5}, {'step': 20, 'train/loss': 0.25}])
    >>> history['train/loss']
    [0.5, 0.25]
    >>> history.steps
    [10, 20]
    >>> print(history)
    step  train/loss
      10         0.5
      20        0.25
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]):
        self.rows = [dict(row) for row in rows]

    @property
    def steps(self) -> list[int]:
        """The step of each row."""
        return [row["step"] for row in self.rows]

    @property
    def columns(self) -> list[str]:
        """The names of all metrics."""
        return list(dict.fromkeys(name for row in self.rows for name in row if name != "step"))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> list[float]:
        """Returns the values of one metric; NaN where a checkpoint has none."""
        if name not in self.columns:
            end = "/" + name.removeprefix("val_")
            same = " or ".join(repr(column) for column in self.columns if column.endswith(end))
            hint = f" Did you mean {same}?" if same else ""
            raise KeyError(
                f"There is no metric {name!r}.{hint} There are {', '.join(self.columns)}."
            )
        values = (row.get(name) for row in self.rows)
        return [math.nan if value is None else float(value) for value in values]

    def _table(self) -> list[list[str]]:
        names = ["step", *(name for name in self.columns if _is_shown(name))]
        return [names, *([_text(row.get(name)) for name in names] for row in self.rows)]

    def __str__(self) -> str:
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in table
        )

    def __repr__(self) -> str:
        span = f"steps {self.steps[0]} to {self.steps[-1]}" if self.rows else "empty"
        return f"<History of {len(self)} checkpoints, {span}>"

    def _repr_html_(self) -> str:
        names, *rows = self._table()
        head = "".join(f"<th>{name}</th>" for name in names)
        body = "".join(f"<tr>{''.join(f'<td>{x}</td>' for x in row)}</tr>" for row in rows)
        return f"<table><tr>{head}</tr>{body}</table>"

    def plot(self, *names: str) -> Any:
        """Draws the metrics over the steps with matplotlib and returns the figure.

        Args:
            *names: Metrics such as 'train/loss'. By default those of training and evaluation,
                with one plot for each name: `train/loss` and `eval/loss` share one.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        try:
            from matplotlib import figure
        except ModuleNotFoundError as error:
            raise ImportError("plot() needs matplotlib: pip install matplotlib") from error
        chosen = names or tuple(name for name in self.columns if _is_shown(name))
        charts = list(dict.fromkeys(name.rpartition("/")[2] for name in chosen))
        picture = _picture_class(figure.Figure)(
            figsize=(4.5 * max(1, len(charts)), 3.2), layout="constrained"
        )
        for i, chart in enumerate(charts):
            axes = picture.add_subplot(1, len(charts), i + 1, title=chart, xlabel="step")
            for name in chosen:
                if name.rpartition("/")[2] == chart:
                    # Some are measured at some of the checkpoints only.
                    values = zip(self.rows, self[name], strict=True)
                    points = [(row["step"], value) for row, value in values if name in row]
                    axes.plot(*zip(*points, strict=True), label=name.rpartition("/")[0] or name)
            axes.legend()
        return picture


def _is_shown(name: str) -> bool:
    return name not in _HIDDEN and not name.startswith(_HIDDEN_GROUPS)


def _picture_class(base: type) -> Any:
    """Returns a class of figures that a notebook shows without further set-up."""

    def to_png(self: Any) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()

    return type("Picture", (base,), {"_repr_png_": to_png})


def _text(value: Any) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.5g}"
