"""Named points at which a test can make the process die.

`TEKOA_FAULT_AT=<point>:<n>:<signal>` sends the signal (a name such as SIGKILL, or a
number) to this process at the n-th time the point is reached, counted from 1.
"""

import collections
import os
import signal

POINTS = (
    "before_write",
    "mid_write",
    "before_manifest",
    "before_rename",
    "after_rename",
    "before_gc",
    "mid_gc",
    "before_tb_flush",
)

_VARIABLE = "TEKOA_FAULT_AT"
_reached: collections.Counter[str] = collections.Counter()


def reach(point: str) -> None:
    """Marks that `point` is reached; a dictionary lookup when no fault is asked for.

    Args:
        point: One of `POINTS`.

    Raises:
        ValueError: If the environment variable is set to something unreadable.
    """
    if _VARIABLE not in os.environ:
        return
    wanted, number, name = _parse(os.environ[_VARIABLE])
    if wanted != point:
        return
    _reached[point] += 1
    if _reached[point] == number:
        os.kill(os.getpid(), name)


def _parse(text: str) -> tuple[str, int, int]:
    parts = text.split(":")
    try:
        point, number, name = parts
        return point, int(number), int(name) if name.isdigit() else signal.Signals[name].value
    except (ValueError, KeyError):
        raise ValueError(
            f"{_VARIABLE}={text!r} is not '<point>:<n>:<signal>'. "
            f"Points: {', '.join(POINTS)}. Example: 'before_rename:2:SIGKILL'."
        ) from None
