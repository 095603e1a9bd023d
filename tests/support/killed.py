"""A program that is killed at one of its changes of files, within the process of a test."""

import threading


class Killed(BaseException):
    """Ends the program where it is raised."""


def kill_at(patch, n, functions, *, is_change=lambda args: True):
    """Raises `Killed` at the n-th call of any of these functions; None for never.

    Args:
        patch: A `pytest.MonkeyPatch`.
        n: Number of the call, from 1. Calls of other threads, which renew a lease, do not count.
        functions: Pairs of an object and the name of its function.
        is_change: Whether a call with these arguments counts.
    """
    n_calls = 0

    def wrap(original):
        def change(*args, **kwargs):
            nonlocal n_calls
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and is_change(args):
                n_calls += 1
                if n_calls == n:
                    raise Killed
            return original(*args, **kwargs)

        return change

    for owner, name in functions:
        patch.setattr(owner, name, wrap(getattr(owner, name)))
