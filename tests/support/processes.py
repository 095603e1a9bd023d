"""Real processes, each under a wall-clock limit."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

TESTS = pathlib.Path(__file__).parents[1]
TINY_MODEL = TESTS / "support" / "tiny_model.py"
# Forty steps, with a validation at every check.
TRAIN = ["train", TINY_MODEL, "--valid_pattern=valid", "--max_train_steps=40"]
LIMIT_SECONDS = 180


def environment(**changes):
    """The environment of a test's process: one CPU device, and `support` can be imported."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
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


class Command:
    """One call of `tekoa` as a process that writes its output to a file."""

    def __init__(self, words, log, **env):
        self.log = log
        with log.open("w") as out:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "tekoa", *map(str, words)],
                env=environment(**env),
                stdout=out,
                stderr=subprocess.STDOUT,
            )

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
        self.popen = subprocess.Popen(
            [*prefix, sys.executable, path, *map(str, args)],
            env=environment(**dict(env)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def read(self):
        """Returns the next object it prints."""
        line = self.popen.stdout.readline()
        assert line, self.popen.stderr.read()
        return json.loads(line)

    def wait(self, limit_seconds=30):
        """Returns its exit code, the objects it printed and its standard error."""
        try:
            out, err = self.popen.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            pytest.fail(f"hang: still running after {limit_seconds} s")
        self.seconds = time.monotonic() - self.started
        return self.popen.returncode, [json.loads(line) for line in out.splitlines()], err

    def close(self):
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.communicate()
