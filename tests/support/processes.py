"""Real processes, each under a wall-clock limit."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import pytest

from support import forks

TESTS = pathlib.Path(__file__).parents[1]
TINY_MODEL = TESTS / "support" / "tiny_model.py"
# Forty steps, with a validation at every check.
TRAIN = ["train", TINY_MODEL, "--valid_pattern=valid", "--max_train_steps=40"]
LIMIT_SECONDS = 180


def environment(**changes):
    """The environment of a test's process: one CPU device, and `support` can be imported.

    Programs are compiled as in the tests themselves: without optimizations, unless those are
    requested by `--optimized`.
    """
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    flags = os.environ.get("XLA_FLAGS", "").split()
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flag for flag in flags if "device_count" not in flag),
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        **changes,
    }


def compile_cache(directory):
    """Variables with which processes share compiled programs."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(directory),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def python(*words, cwd=None, env=(), timeout=LIMIT_SECONDS):
    """Runs this Python to its end, with these variables changed; its output is text."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, **dict(env)},
        timeout=timeout,
        text=True,
        capture_output=True,
        check=False,
    )


def start(args, output, errors=None, **env):
    """Starts a Python program that writes to a file, and its errors to the same or another."""
    args, env = [str(word) for word in args], environment(**env)
    if args[0] == sys.executable and "LD_PRELOAD" not in env:
        return forks.Fork(args, env=env, stdout=output, stderr=errors or output)
    return subprocess.Popen(args, env=env, stdout=output, stderr=errors or output)


def is_suspended(pid):
    """Whether a process was stopped by SIGSTOP."""
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


class Command:
    """One call of `tekoa` as a process that writes its output to a file."""

    def __init__(self, words, log, **env):
        self.log = log
        with log.open("w") as out:
            self.popen = start([sys.executable, "-m", "tekoa", *words], out, **env)

    def output(self):
        return self.log.read_text()

    def wait_until(self, condition):
        """Waits for a condition; fails if the process exits first."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not condition():
            assert self.popen.poll() is None, self.output()
            assert time.monotonic() < deadline, f"hang: {self.output()}"
            time.sleep(0.002)

    def send(self, number):
        self.popen.send_signal(number)

    def wait(self):
        """Returns the exit code and the seconds it took to arrive."""
        started = time.monotonic()
        try:
            return self.popen.wait(LIMIT_SECONDS), time.monotonic() - started
        except subprocess.TimeoutExpired:
            pytest.fail(f"hang: {self.output()}")

    def close(self):
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()


class Program:
    """A helper program that prints one JSON object per line."""

    def __init__(self, path, *args, env=(), prefix=()):
        self.started = time.monotonic()
        self._directory, self._n_read = tempfile.TemporaryDirectory(), 0
        self._out, self._err = (pathlib.Path(self._directory.name, n) for n in ("out", "err"))
        words = [*prefix, sys.executable, path, *args]
        with self._out.open("w") as out, self._err.open("w") as err:
            self.popen = start(words, out, err, **dict(env))

    def _lines(self):
        """Returns the lines that were not read yet."""
        return self._out.read_text().splitlines(keepends=True)[self._n_read :]

    def read(self):
        """Returns the next object it prints."""
        is_running = True
        while not (lines := [line for line in self._lines() if line.endswith("\n")]):
            assert is_running, self.errors()
            is_running = self.popen.poll() is None
            time.sleep(0.005)
        self._n_read += 1
        return json.loads(lines[0])

    def errors(self):
        return self._err.read_text()

    def wait(self):
        """Returns its exit code, the objects it printed and its standard error."""
        try:
            code = self.popen.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            pytest.fail(f"hang: still running after {LIMIT_SECONDS} s")
        self.seconds = time.monotonic() - self.started
        return code, [json.loads(line) for line in self._lines()], self.errors()

    def close(self):
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        self._directory.cleanup()
