"""Real processes for the fault cases, each under a wall limit."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

PROGRAMS = pathlib.Path(__file__).parent / "programs"
collect_ignore = ["programs"]


class Process:
    """A helper program of this folder, with what it printed."""

    def __init__(self, program, *args, env=(), prefix=()):
        self.started = time.monotonic()
        self.popen = subprocess.Popen(
            [*prefix, sys.executable, PROGRAMS / program, *map(str, args)],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **dict(env)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def read(self):
        """Gives the facts of the next line it prints."""
        line = self.popen.stdout.readline()
        assert line, self.popen.stderr.read()
        return json.loads(line)

    def end(self, limit_seconds=30):
        """Waits for it; gives its exit code, facts and errors. Past the limit it hangs."""
        try:
            out, err = self.popen.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            pytest.fail(f"hang: not ended after {limit_seconds} s")
        self.seconds = time.monotonic() - self.started
        return self.popen.returncode, [json.loads(line) for line in out.splitlines()], err


@pytest.fixture
def launch():
    """Starts helper programs and ends what still runs after the test."""
    started = []

    def start(program, *args, **options):
        started.append(Process(program, *args, **options))
        return started[-1]

    yield start
    for process in started:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.communicate()


@pytest.fixture
def figure(request, capsys):
    """Prints the figure of a case, past pytest's capture."""

    def show(**values):
        text = ", ".join(f"{name} {value}" for name, value in values.items())
        with capsys.disabled():
            print(f"\n[{request.node.name}] {text}")

    return show
