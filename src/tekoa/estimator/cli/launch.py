"""`tekoa launch` runs a command in several processes on this machine.

Every process runs the same command with its own --process_id, as on a cluster. The standard
output of process 0, which prints the results, is passed through unchanged; all other lines
are prefixed with the index of their process. Signals are forwarded to all processes. If one
process fails, the others exit as well, or are killed after --grace seconds; after two seconds if
it was killed itself. If the launcher is killed, so are they.

With --max_restarts=N, all processes are started again, up to N times, if one was lost, killed or
stopped; `train` then resumes from the last checkpoint. It is not done after a signal to the
launcher, nor after an error that would occur again.

The exit code is 0 if all processes succeed, otherwise that of the first process that failed.
Processes that failed only because they lost another one (69) count last.
"""

import contextlib
import dataclasses
import math
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

from tekoa.estimator.cli.exit_codes import ExitCode
from tekoa.estimator.cli.flags import UsageError
from tekoa.hosts import EXIT_PEER_LOST, EXIT_STOPPED, signals

USAGE = (
    "tekoa launch --processes=N [--devices=M] [--grace=SECONDS] [--max_restarts=K] "
    "COMMAND [MODEL] [--flags]"
)
_COMMANDS = ("train", "eval", "eval_wait", "predict")
# Each process needs hundreds of megabytes, each device a thread.
_RANGES = {
    "processes": (1, 64),
    "devices": (1, 256),
    "grace": (1, 86_400),
    "max_restarts": (0, 1_000_000),
}
# On Linux, PR_SET_PDEATHSIG (1) kills a process when its parent dies; it outlasts `exec`.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None)
if hasattr(libc, "prctl"):
    libc.prctl(1, int(signal.SIGKILL))
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
# A killed process reports nothing: the others would wait until its heartbeat is missed.
_KILLED_GRACE_SECONDS = 2.0
# Part of the messages of JAX's CPU collectives, sometimes several on one line.
_NOISE = b" peer ranks"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The flags of `launch` itself.

    Attributes:
        processes: Number of processes.
        devices: CPU devices per process; None leaves the choice to JAX.
        grace: Seconds that the other processes have to exit after one has failed.
        max_restarts: How often to start all processes again after one was lost.
    """

    processes: int
    devices: int | None = None
    grace: int = 30
    max_restarts: int = 0


def launch(arguments: Sequence[str]) -> int:
    """Runs a command in several processes and returns the exit code.

    Raises:
        UsageError: If the flags of `launch` or the command are invalid.
    """
    options, command = parse(arguments)
    group: Group | None = None
    received: list[int] = []

    def forward(number: int, _: Any) -> None:
        received.append(number)
        if number == signal.SIGHUP:
            signals.replace_closed_terminal()
        if group is not None:
            group.send(number)

    handlers = {
        number: signal.signal(number, forward)
        for number in signals.SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN  # As SIGHUP under nohup.
    }
    try:
        for n_left in reversed(range(options.max_restarts + 1)):
            group = _start(options, command)
            for number in received:  # During the start.
                group.send(number)
            code = group.wait(grace_seconds=options.grace)
            if not n_left or received or not can_restart(code):
                return code
            print(f"tekoa launch: restarting ({n_left - 1} left).", file=sys.stderr, flush=True)
        raise AssertionError("A group that may not be restarted returns.")
    finally:
        if group is not None:
            group.kill()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _start(options: LaunchOptions, command: list[str]) -> "Group":
    n = options.processes
    shared = [*command, f"--coordinator_address=127.0.0.1:{free_port()}", f"--num_processes={n}"]
    return Group(
        [[sys.executable, "-m", "tekoa", *shared, f"--process_id={i}"] for i in range(n)],
        env={} if options.devices is None else {"JAX_NUM_CPU_DEVICES": str(options.devices)},
    )


def can_restart(code: int) -> bool:
    """Returns whether to run a command again that ended with this code.

    >>> [can_restart(code) for code in (69, 75, 128 + 9, 0, 2, 74)]
    [True, True, True, False, False, False]
    """
    was_killed = code > 128 and code != ExitCode.PIPE
    return was_killed or code in (EXIT_PEER_LOST, EXIT_STOPPED)


def parse(arguments: Sequence[str]) -> tuple[LaunchOptions, list[str]]:
    """Separates the flags of `launch` from the command that follows them.

    >>> parse(['--processes', '2', 'train', 'mnist'])
    (LaunchOptions(processes=2, devices=None, grace=30, max_restarts=0), ['train', 'mnist'])
    """
    options: dict[str, int] = {}
    rest = list(arguments)
    names = [field.name for field in dataclasses.fields(LaunchOptions)]
    while rest and rest[0].startswith("--") and rest[0][2:].partition("=")[0] in names:
        name, equals, text = rest.pop(0)[2:].partition("=")
        text = text if equals else (rest.pop(0) if rest else "")
        low, high = _RANGES[name]
        if not re.fullmatch("[0-9]{1,9}", text) or not low <= int(text) <= high:
            raise UsageError(
                f"--{name} must be an integer from {low} to {high}, got {text[:40]!r}."
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
    """Returns a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Group:
    """Processes that start and end together.

    Args:
        commands: One command per process.
        env: Variables added to the environment.
    """

    def __init__(self, commands: Sequence[Sequence[str]], *, env: dict[str, str]):
        self._killed: set[int] = set()
        prefix = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
        # Each runs in a new session, so that Ctrl-C reaches it only once, through `send`.
        self._processes = [
            subprocess.Popen(
                [*prefix, *command],
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

    def send(self, number: int) -> None:
        """Sends a signal to all running processes."""
        for process in self._processes:
            process.send_signal(number)

    def wait(self, *, grace_seconds: float) -> int:
        """Waits for all processes and returns the exit code of the group."""
        ended: dict[int, int] = {}  # In the order in which they ended.
        deadline = math.inf
        while len(ended) < len(self._processes):
            for index, process in enumerate(self._processes):
                code = process.poll()
                if code is None or index in ended:
                    continue
                ended[index] = code
                if code:
                    grace = grace_seconds if code > 0 else min(grace_seconds, _KILLED_GRACE_SECONDS)
                    deadline = min(deadline, time.monotonic() + grace)
            if time.monotonic() > deadline:
                self.kill()
            time.sleep(0.05)
        for reader in self._readers:
            reader.join()
        codes = {i: _code(code) for i, code in ended.items() if code and i not in self._killed}
        if not codes:
            return 0
        own_reasons = [i for i in codes if codes[i] != EXIT_PEER_LOST]
        first = next(iter(own_reasons or codes))
        if codes[first] != EXIT_STOPPED:
            text = f"process {first} failed first, with code {codes[first]}"
            print(f"tekoa launch: {text}.", file=sys.stderr, flush=True)
        return codes[first]

    def kill(self) -> None:
        """Kills all running processes."""
        for index, process in enumerate(self._processes):
            if process.poll() is None:
                self._killed.add(index)
                process.kill()
                process.wait()


def _code(code: int) -> int:
    """Returns an exit code as a shell reports it; JAX aborts when it loses a process."""
    if code == -signal.SIGABRT:
        return EXIT_PEER_LOST
    return code if code >= 0 else 128 - code


def _copy(source: IO[bytes], target: Any, prefix: str) -> None:
    """Copies lines as they arrive; each is written in one piece."""
    with source:
        for line in source:
            # The processes continue if nobody reads their output.
            with contextlib.suppress(OSError):
                if _NOISE not in line:
                    target.write(prefix + line.decode(errors="replace"))
                    target.flush()
