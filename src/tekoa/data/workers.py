"""Worker processes that make whole batches, for map functions that cost more than a copy.

Batch i is a pure function, so a worker needs to be told nothing but i. Each has a pipe of
its own: when the parent dies, however it dies, the pipe closes and the worker ends. A
signal meant for the run is the parent's business, so workers ignore SIGINT and SIGTERM.
"""

import atexit
import collections
import multiprocessing
import signal
import traceback
import weakref
from typing import Any, Protocol

from tekoa.data.reader import DataError, Reader

# Batches under way per worker: one being made, one waiting to be fetched.
_AHEAD = 2


class Maker(Protocol):
    """What makes batches; a `BatchMaker`."""

    @property
    def reader(self) -> Reader:
        """Where the rows come from."""
        ...

    def make(self, first: int, n_batches: int) -> list[Any]:
        """Makes batches from number `first` on."""
        ...


class Pool:
    """Makes batches in `n_workers` processes, handed out in order."""

    def __init__(self, maker: Maker, n_workers: int):
        if maker.reader.is_stream:
            raise DataError(
                f"{maker.reader.name} can only be read forwards, so workers cannot share it. "
                "Leave out workers, or use a format with random access."
            )
        self._workers = [_Worker(maker) for _ in range(n_workers)]
        self._asked: collections.deque[int] = collections.deque()
        _close_at_exit(self)

    def make(self, at: int) -> list[Any]:
        """Gives batch number `at` as a list of one, or an empty list past the end."""
        if self._asked and self._asked[0] != at:
            self._forget()
        while len(self._asked) < _AHEAD * len(self._workers):
            ask = at + len(self._asked)
            self._worker(ask).send(ask)
            self._asked.append(ask)
        problem, batches = self._worker(self._asked.popleft()).receive()
        if problem:
            raise DataError(f"Batch {at} failed in a data worker. {problem}")
        return batches

    def close(self) -> None:
        """Ends the processes; the pool cannot be used after."""
        for worker in self._workers:
            worker.close()
        self._workers = []

    def _worker(self, at: int) -> "_Worker":
        return self._workers[at % len(self._workers)]

    def _forget(self) -> None:
        """Throws away the batches under way, after a restore."""
        while self._asked:
            self._worker(self._asked.popleft()).receive()


class _Worker:
    def __init__(self, maker: Maker):
        # Forking a process that runs JAX's threads can hang it.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, maker), daemon=True)
        try:
            self._process.start()
        except Exception as error:
            raise DataError(
                f"The data cannot be sent to a worker process: {error}. Use functions defined at "
                "the top of a module in source.map, or leave out workers."
            ) from error
        theirs.close()

    def send(self, ask: int) -> None:
        self._guarded(self._pipe.send, ask)

    def receive(self) -> tuple[str | None, list[Any]]:
        return self._guarded(self._pipe.recv)

    def _guarded(self, call: Any, *args: Any) -> Any:
        try:
            return call(*args)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join(5)
            raise DataError(
                f"A data worker ended by itself with exit code {self._process.exitcode}. If it is "
                "-9, memory may have run out: use fewer workers or smaller batches. If it is 1, "
                "see its own message: a script needs `if __name__ == '__main__':` around its work."
            ) from None

    def close(self) -> None:
        self._pipe.close()
        self._process.join(2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Any, maker: Maker) -> None:
    """Runs in the worker: makes the batches it is asked for until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        try:
            ask = pipe.recv()
            pipe.send(_answer(maker, ask))
        except (EOFError, OSError):
            return


def _answer(maker: Maker, ask: int) -> tuple[str | None, list[Any]]:
    try:
        return None, maker.make(ask, 1)
    except DataError as error:
        return str(error), []
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{traceback.format_exc()}", []


def _close_at_exit(pool: Pool) -> None:
    # Runs before multiprocessing's own exit hook, which would wait for processes that
    # ignore its SIGTERM: hooks run last in, first out, and that one is registered already.
    reference = weakref.ref(pool)

    def close() -> None:
        if (live := reference()) is not None:
            live.close()

    atexit.register(close)
    weakref.finalize(pool, atexit.unregister, close).atexit = False
