"""`tekoa launch` runs a command in several processes on this machine, for testing.

Every process runs the same command with its own --process_id, as on a cluster. The standard
output of process 0, which prints the results, is passed through unchanged; all other lines
are prefixed with the index of their process. Signals are forwarded to all processes. If one
process fails, the others exit as well, or are killed after --grace seconds.

The exit code is 0 if all processes succeed, otherwise that of the first process that failed.
Processes that failed only because they lost a peer (69) count last.
"""

import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

from tekoa.estimator.cli.flags import UsageError
from tekoa.hosts import EXIT_PEER_LOST

USAGE = "tekoa launch --processes=N [--devices=M] [--grace=SECONDS] COMMAND [MODEL] [--flags]"
_COMMANDS = ("train", "eval", "eval_wait", "predict")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# Each process needs hundreds of megabytes, each device a thread.
_MOST = {"processes": 64, "devices": 256, "grace": 86_400}
# Part of the messages of JAX's CPU collectives, sometimes several on one line.
_NOISE = b" peer ranks"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The flags of `launch` itself.

    Attributes:
        processes: Number of processes.
        devices: CPU devices per process; None leaves the choice to JAX.
        grace: Seconds that the other processes have to exit after one has failed.
    """

    processes: int
    devices: int | None = None
    grace: int = 30


def launch(arguments: Sequence[str]) -> int:
    """Runs a command in several processes and returns the exit code.

    Raises:
        UsageError: If the flags of `launch` or the command are invalid.
    """
    options, command = parse(arguments)
    address, n = f"127.0.0.1:{free_port()}", options.processes
    shared = [*command, f"--coordinator_address={address}", f"--num_processes={n}"]
    group = Group(
        [[sys.executable, "-m", "tekoa", *shared, f"--process_id={i}"] for i in range(n)],
        env={} if options.devices is None else {"JAX_NUM_CPU_DEVICES": str(options.devices)},
    )
    handlers = {number: signal.signal(number, group.send) for number in _SIGNALS}
    try:
        return group.wait(grace_seconds=options.grace)
    finally:
        group.kill()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def parse(arguments: Sequence[str]) -> tuple[LaunchOptions, list[str]]:
    """Separates the flags of `launch` from the command that follows them.

    >>> parse(['--processes', '2', 'train', 'mnist', '--progress=false'])
    (LaunchOptions(processes=2, devices=None, grace=30), ['train', 'mnist', '--progress=false'])
    """
    options: dict[str, int] = {}
    rest = list(arguments)
    names = [field.name for field in dataclasses.fields(LaunchOptions)]
    while rest and rest[0].startswith("--") and rest[0][2:].partition("=")[0] in names:
        name, equals, text = rest.pop(0)[2:].partition("=")
        text = text if equals else (rest.pop(0) if rest else "")
        if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= _MOST[name]:
            raise UsageError(
                f"--{name} must be an integer from 1 to {_MOST[name]}, got {text[:40]!r}."
            )
        options[name] = int(text)
    if "processes" not in options:
        raise UsageError(f"launch needs the number of processes. Usage: {USAGE}")
    if not rest:
        raise UsageError(f"launch needs a command. Usage: {USAGE}")
    if not rest[0].startswith("-") and rest[0] not in _COMMANDS:
        raise UsageError(
            f"launch runs {', '.join(_COMMANDS[:-1])} or {_COMMANDS[-1]}, got {rest[0]!r}."
        )
    return LaunchOptions(**options), rest


def free_port() -> int:
    """Returns a port that is free along with the next one."""
    for _ in range(100):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("", port + 1))
            except (OSError, OverflowError):
                continue
            return port
    raise UsageError("No two consecutive ports are free on this machine.")


class Group:
    """Processes that start and end together.

    Args:
        commands: One command per process.
        env: Variables added to the environment.
    """

    def __init__(self, commands: Sequence[Sequence[str]], *, env: dict[str, str]):
        self._killed: set[int] = set()
        # Each runs in a new session, so that Ctrl-C reaches it only once, through `send`.
        self._processes = [
            subprocess.Popen(
                command,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            for command in commands
        ]
        self._readers = [
            threading.Thread(target=_copy, args=arguments, daemon=True)
            for index, process in enumerate(self._processes)
            for arguments in (
                (process.stdout, sys.stdout, f"[{index}] " if index else ""),
                (process.stderr, sys.stderr, f"[{index}] "),
            )
        ]
        for reader in self._readers:
            reader.start()

    def send(self, number: int, _: Any = None) -> None:
        """Sends a signal to all running processes."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def wait(self, *, grace_seconds: float) -> int:
        """Waits for all processes and returns the exit code of the group."""
        failed: list[int] = []
        deadline = None
        while any(process.poll() is None for process in self._processes):
            for index, process in enumerate(self._processes):
                if process.poll() and index not in failed:
                    failed.append(index)
                    deadline = deadline or time.monotonic() + grace_seconds
            if deadline is not None and time.monotonic() > deadline:
                self.kill()
            time.sleep(0.05)
        for reader in self._readers:
            reader.join()
        failed += [i for i, p in enumerate(self._processes) if p.returncode and i not in failed]
        codes = [self._processes[i].returncode for i in failed if i not in self._killed]
        codes = [code if code > 0 else 128 - code for code in codes]  # As a shell reports them.
        own_reasons = [code for code in codes if code != EXIT_PEER_LOST]
        return (own_reasons or codes or [0])[0]

    def kill(self) -> None:
        """Kills all running processes."""
        for index, process in enumerate(self._processes):
            if process.poll() is None:
                self._killed.add(index)
                process.kill()
                process.wait()


def _copy(source: IO[bytes], target: Any, prefix: str) -> None:
    """Copies lines as they arrive; each is written in one piece."""
    # The processes go on if nobody reads their output.
    with source, contextlib.suppress(BrokenPipeError):
        for line in source:
            if _NOISE not in line:
                target.write(prefix + line.decode(errors="replace"))
                target.flush()
