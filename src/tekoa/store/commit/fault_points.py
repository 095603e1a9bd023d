"""Named points at which a test can kill the process.

`TEKOA_FAULT_AT=<point>:<n>:<signal>` sends the signal (a name such as SIGKILL, or a
number) to this process the n-th time the point is reached, counting from 1.
"""

import collections
import os
import signal

POINTS = (
    "before_write",
    "mid_write",
    "mid_read",
    "before_manifest",
    "before_rename",
    "after_rename",
    "before_gc",
    "mid_gc",
    "before_tb_flush",
    "before_upload",
    "mid_upload",
    "before_head",
    "after_head",
    "mid_remote_gc",
)

_VARIABLE = "TEKOA_FAULT_AT"
_reached: collections.Counter[str] = collections.Counter()


def reach(point: str) -> None:
    """Marks `point` as reached; without a requested fault this is a dictionary lookup.

    Args:
        point: One of `POINTS`.

    Raises:
        ValueError: If the environment variable is malformed.
    """
    if _VARIABLE not in os.environ:
        return
    fault_point, n, signal_number = _parse(os.environ[_VARIABLE])
    if fault_point != point:
        return
    _reached[point] += 1
    if _reached[point] == n:
        # In this thread: a signal to the process may reach another one, later.
        signal.raise_signal(signal_number)


def _parse(text: str) -> tuple[str, int, int]:
    try:
        point, n, name = text.split(":")
        return point, int(n), int(name) if name.isdigit() else signal.Signals[name].value
    except (ValueError, KeyError):
        raise ValueError(
            f"{_VARIABLE}={text!r} is not '<point>:<n>:<signal>'. "
            f"Points: {', '.join(POINTS)}. Example: 'before_rename:2:SIGKILL'."
        ) from None
