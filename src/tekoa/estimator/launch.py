"""`tekoa launch`: several processes on this machine, for trying and testing.

Each process is the same command with its number, as a cluster would start it. Lines of
process 0's standard output pass as they are, since results are printed there; all other
lines begin with the number of their process. Signals are passed on to all. When one
process fails the others end too: by themselves, or by force after some seconds.

The exit code is 0 if all ended with 0, else that of the first that failed for a reason of
its own; that a peer is lost (69) counts only where there is no other.
"""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

from tekoa.core.hosts import EXIT_PEER_LOST
from tekoa.estimator.config import UsageError

USAGE = "tekoa launch --processes=N [--devices=M] [--grace=SECONDS] COMMAND [MODEL] [--flags]"
_COMMANDS = ("train", "eval", "eval_wait", "predict")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# JAX's collectives on CPU greet one another, several at a time in one line.
_NOISE = b" peer ranks"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What was said before the command.

    Attributes:
        processes: How many to start.
        devices: CPU devices of each; None: as JAX finds them.
        grace: Seconds that the others have to end once one has failed.
    """

    processes: int
    devices: int | None = None
    grace: int = 30


def launch(arguments: Sequence[str]) -> int:
    """Runs a command in several processes; gives the exit code.

    Raises:
        UsageError: If the words before the command are not understood.
    """
    options, command = parse(arguments)
    address = f"127.0.0.1:{free_port()}"
    group = Group(
        [
            [
                *[sys.executable, "-m", "tekoa", *command],
                f"--coordinator_address={address}",
                f"--num_processes={options.processes}",
                f"--process_id={index}",
            ]
            for index in range(options.processes)
        ],
        env={} if options.devices is None else {"JAX_NUM_CPU_DEVICES": str(options.devices)},
    )
    before = {number: signal.signal(number, group.send) for number in _SIGNALS}
    try:
        return group.wait(grace_seconds=options.grace)
    finally:
        group.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def parse(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """Tells the flags of `launch` from the command after them.

    >>> parse(['--processes', '2', 'train', 'mnist', '--progress=false'])
    (Options(processes=2, devices=None, grace=30), ['train', 'mnist', '--progress=false'])
    """
    found: dict[str, int] = {}
    rest = list(arguments)
    names = [field.name for field in dataclasses.fields(Options)]
    while rest and rest[0].startswith("--") and rest[0][2:].partition("=")[0] in names:
        name, equals, text = rest.pop(0)[2:].partition("=")
        text = text if equals else (rest.pop(0) if rest else "")
        if not text.isdigit() or int(text) < 1:
            raise UsageError(f"--{name} must be a number of 1 or more, got {text!r}.")
        found[name] = int(text)
    if "processes" not in found:
        raise UsageError(f"How many processes? {USAGE}.")
    if not rest:
        raise UsageError(f"Which command is to be launched? {USAGE}.")
    if not rest[0].startswith("-") and rest[0] not in _COMMANDS:
        raise UsageError(f"launch runs one of {', '.join(_COMMANDS)}, not {rest[0]!r}.")
    return Options(**found), rest


def free_port() -> int:
    """Gives a port that is free, and the next one too."""
    for _ in range(100):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("", port + 1))
            except (OSError, OverflowError):
                continue
            return port
    raise UsageError("No two ports in a row are free on this machine.")


class Group:
    """Processes that live and die together.

    Args:
        commands: One for each process.
        env: Variables to add to the environment.
    """

    def __init__(self, commands: Sequence[Sequence[str]], *, env: dict[str, str]):
        self._forced: set[int] = set()
        # A session of their own: Ctrl-C reaches them through `send` alone, and once.
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
            threading.Thread(target=_copy, args=(source, target, prefix), daemon=True)
            for index, process in enumerate(self._processes)
            for source, target, prefix in (
                (process.stdout, sys.stdout, f"[{index}] " if index else ""),
                (process.stderr, sys.stderr, f"[{index}] "),
            )
        ]
        for reader in self._readers:
            reader.start()

    def send(self, number: int, _: Any = None) -> None:
        """Passes a signal on to all."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def wait(self, *, grace_seconds: float) -> int:
        """Waits for all; gives the exit code of the whole."""
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
        return self._code(failed)

    def _code(self, failed: Sequence[int]) -> int:
        codes = [
            code if (code := self._processes[i].returncode) > 0 else 128 - code
            for i in failed
            if i not in self._forced
        ]
        own = [code for code in codes if code != EXIT_PEER_LOST]
        return (own or codes or [0])[0]

    def kill(self) -> None:
        """Ends all that still run, by force."""
        for index, process in enumerate(self._processes):
            if process.poll() is None:
                self._forced.add(index)
                process.kill()
                process.wait()


def _copy(source: IO[bytes], target: Any, prefix: str) -> None:
    """Copies lines as they come, each in one piece."""
    with source:
        for line in source:
            if _NOISE not in line:
                target.write(prefix + line.decode(errors="replace"))
                target.flush()
