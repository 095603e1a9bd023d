"""Real processes on loopback, each under a wall limit."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing import event_accumulator

from tekoa import store

TINY = pathlib.Path(__file__).parent / "programs" / "tiny.py"
LIMIT_SECONDS = 180
collect_ignore = ["programs"]


class Process:
    """One process of the command, with what it said."""

    def __init__(self, words, log, env):
        self.log = log
        with log.open("w") as out:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "tekoa", *map(str, words)],
                env={
                    **os.environ,
                    "JAX_PLATFORMS": "cpu",
                    "XLA_FLAGS": "",
                    "PYTHONUNBUFFERED": "1",
                    **env,
                },
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def said(self):
        return self.log.read_text()

    def wait_for(self, condition):
        """Waits until something is so; fails if the process ends first."""
        until = time.monotonic() + LIMIT_SECONDS
        while not condition():
            assert self.popen.poll() is None, self.said()
            assert time.monotonic() < until, f"hang: {self.said()}"
            time.sleep(0.01)

    def end(self):
        """Gives the exit code and the seconds until it came."""
        began = time.monotonic()
        try:
            return self.popen.wait(LIMIT_SECONDS), time.monotonic() - began
        except subprocess.TimeoutExpired:
            pytest.fail(f"hang: {self.said()}")

    def close(self):
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGKILL)
            self.popen.wait()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def start(home):
    """`start("train", TINY, ...)` starts a process; what still runs is ended afterwards."""
    started = []

    def begin(*words, **env):
        log = home / f"{len(started)}.log"
        started.append(Process(words, log, env))
        return started[-1]

    yield begin
    for process in started:
        process.close()


@pytest.fixture(scope="module")
def run(start):
    """Runs a command to its end; gives what it said."""

    def call(*words, code=0, **env):
        process = start(*words, **env)
        assert process.end()[0] == code, process.said()
        return process.said()

    return call


@pytest.fixture
def pair(start):
    """Starts a command as two processes, as a cluster would; gives both."""

    def begin(*words, env=({}, {}), extra=((), ()), timeout=30):
        port = free_port()
        return [
            start(
                *words,
                *extra[index],
                f"--coordinator_address=127.0.0.1:{port}",
                "--num_processes=2",
                f"--process_id={index}",
                f"--host_timeout_secs={timeout}",
                JAX_NUM_CPU_DEVICES="2",
                **env[index],
            )
            for index in range(2)
        ]

    return begin


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def points():
    """Every point that TensorBoard would show of a directory, by tag and step."""

    def read(directory):
        reader = event_accumulator.EventAccumulator(str(directory), size_guidance={"scalars": 0})
        reader.Reload()
        return {
            (tag, point.step): point.value
            for tag in reader.Tags()["scalars"]
            for point in reader.Scalars(tag)
        }

    return read


@pytest.fixture(scope="module")
def alone(run, home):
    """A run of one process with as many devices as two have."""
    flags = [f"--model_dir={home / 'alone'}", "--mesh=data=4"]
    run("train", TINY, *flags, JAX_NUM_CPU_DEVICES="4")
    return home / "alone"


@pytest.fixture(scope="module")
def assert_close():
    """Fails if two runs hold other numbers at a step, beyond rounding."""

    def check(found, expected, step):
        items = ["model_params", "optimizer_state"]
        trees = [store.load(path, step=step, items=items) for path in (found, expected)]
        a, b = ({item: tree[item] for item in items} for tree in trees)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), a, b)

    return check


@pytest.fixture
def figure(request, capsys):
    """Prints the figure of a case, past pytest's capture."""

    def show(**values):
        text = ", ".join(f"{name} {value}" for name, value in values.items())
        with capsys.disabled():
            print(f"\n[{request.node.name}] {text}")

    return show
