"""Worker processes that create complete batches, for map functions slower than a copy.

Batch i is a pure function of i, so a request to a worker is just this number. Each worker has
its own pipe: when the parent exits, for whatever reason, the pipe closes and the worker exits.
Workers ignore SIGINT and SIGTERM, which the parent handles.
"""

import atexit
import collections
import contextlib
import multiprocessing
import queue
import signal
import threading
import traceback
import weakref
from multiprocessing import reduction, resource_tracker
from typing import Any, Protocol

from tekoa.data.readers.base import DataError, Reader

# Pending batches per worker: one in progress, one waiting to be fetched.
_AHEAD = 2
_IGNORED = (signal.SIGINT, signal.SIGTERM)


class Maker(Protocol):
    """Creates batches; see `BatchMaker`."""

    @property
    def reader(self) -> Reader:
        """The reader of the rows."""
        ...

    def make(self, first: int, n_batches: int) -> list[Any]:
        """Creates batches from number `first` on."""
        ...


class Pool:
    """Creates batches in `n_workers` processes and returns them in order."""

    def __init__(self, maker: Maker, n_workers: int):
        if maker.reader.is_stream:
            raise DataError(
                f"{maker.reader.name} can only be read forwards, so workers cannot share it. "
                "Use workers=0 or a format with random access."
            )
        self._workers = [_Worker(maker) for _ in range(n_workers)]
        self._pending: collections.deque[int] = collections.deque()
        _close_at_exit(self)

    def make(self, at: int) -> list[Any]:
        """Returns batch number `at` as a list of one, or an empty list past the end."""
        if self._pending and self._pending[0] != at:
            self._discard_pending()
        while len(self._pending) < _AHEAD * len(self._workers):
            number = at + len(self._pending)
            self._worker(number).send(number)
            self._pending.append(number)
        problem, batches = self._worker(self._pending.popleft()).receive()
        if problem:
            raise DataError(f"Batch {at} failed in a data worker. {problem}")
        return batches

    def close(self) -> None:
        """Stops the processes; the pool cannot be used afterwards."""
        for worker in self._workers:
            worker.close()
        self._workers = []

    def _worker(self, number: int) -> "_Worker":
        return self._workers[number % len(self._workers)]

    def _discard_pending(self) -> None:
        """Discards pending batches after a change of position."""
        while self._pending:
            self._worker(self._pending.popleft()).receive()


class _Worker:
    def __init__(self, maker: Maker):
        # Forking a process with JAX's threads can deadlock.
        context = multiprocessing.get_context("spawn")
        self._pipe, worker_pipe = context.Pipe()
        self._process = context.Process(target=_serve, args=(worker_pipe, maker), daemon=True)
        # A signal to all processes must not end a worker that is still starting. Python's tracker
        # changes the mask too, when it starts.
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        try:
            self._process.start()
        except Exception as error:
            raise DataError(
                f"Cannot send the data to a worker process: {error}. Pass functions defined at the "
                "top level of a module to source.map, or use workers=0."
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        worker_pipe.close()

    def send(self, number: int) -> None:
        self._communicate(self._pipe.send, number)

    def receive(self) -> tuple[str | None, list[Any]]:
        return self._communicate(self._pipe.recv)

    def _communicate(self, call: Any, *args: Any) -> Any:
        try:
            return call(*args)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join(5)
            raise DataError(
                f"A data worker exited unexpectedly with code {self._process.exitcode}. If it is "
                "-9, the machine may be out of memory: use fewer workers or smaller batches. If it "
                "is 1, see the worker's message: a script needs `if __name__ == '__main__':`."
            ) from None

    def close(self) -> None:
        self._pipe.close()
        self._process.join(2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Any, maker: Maker) -> None:
    """Runs in the worker: creates the requested batches until the pipe closes."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    # A batch is larger than the buffer of a pipe: while it waits to be fetched, the next is made.
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_send, args=(pipe, ready), daemon=True).start()
    while True:
        try:
            number = pipe.recv()
        except (EOFError, OSError):
            return
        ready.put(_make_batch(maker, number))


def _send(pipe: Any, ready: "queue.SimpleQueue[Any]") -> None:
    with contextlib.suppress(OSError):
        while True:
            pipe.send_bytes(ready.get())


def _make_batch(maker: Maker, number: int) -> Any:
    """Returns an error message or None, and the batch as a list of one, as `send` encodes them."""
    encode = reduction.ForkingPickler.dumps
    try:
        return encode((None, maker.make(number, 1)))
    except DataError as error:
        return encode((str(error), []))
    except Exception as error:
        return encode((f"{type(error).__name__}: {error}\n{traceback.format_exc()}", []))


def _close_at_exit(pool: Pool) -> None:
    # Must run before multiprocessing's exit hook, which would wait for processes that ignore
    # SIGTERM. Hooks run in reverse order, and that one is already registered.
    reference = weakref.ref(pool)

    def close() -> None:
        if (live := reference()) is not None:
            live.close()

    atexit.register(close)
    weakref.finalize(pool, atexit.unregister, close).atexit = False
