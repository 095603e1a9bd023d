"""Several processes on loopback, each under a wall-clock limit."""

import functools

import jax
import numpy as np
import pytest

from support import events, processes
from support.processes import TRAIN
from tekoa import store
from tekoa.estimator.cli.launch import free_port


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def start(home):
    """`start("train", ...)` starts a command; what still runs is ended afterwards."""
    commands = []

    def begin(*words, **env):
        log = home / f"{len(commands)}.log"
        commands.append(processes.Command(words, log, **env))
        return commands[-1]

    yield begin
    for command in commands:
        command.close()


@pytest.fixture(scope="module")
def run(start):
    """Runs a command to its end and returns its output."""

    def call(*words, code=0, **env):
        command = start(*words, **env)
        assert command.wait()[0] == code, command.output()
        return command.output()

    return call


@pytest.fixture(scope="module")
def together(start):
    """Starts a command as several processes, as a cluster would, and returns them."""

    def begin(n, *words, env=None, extra=None, timeout=30, devices=1):
        port = free_port()
        return [
            start(
                *words,
                *(extra or {}).get(index, ()),
                f"--coordinator_address=127.0.0.1:{port}",
                f"--num_processes={n}",
                f"--process_id={index}",
                f"--host_timeout_secs={timeout}",
                **{"JAX_NUM_CPU_DEVICES": str(devices), **(env or {}).get(index, {})},
            )
            for index in range(n)
        ]

    return begin


@pytest.fixture
def pair(together):
    """Starts a command as two processes with two devices each, and returns both."""
    return functools.partial(together, 2, devices=2)


@pytest.fixture(scope="module")
def points():
    """Returns every point that TensorBoard would show of a directory, by tag and step."""

    def read(directory):
        curves = events.read_points(directory)
        return {(tag, step): value for tag, curve in curves.items() for step, value in curve}

    return read


@pytest.fixture(scope="module")
def alone(run, home):
    """A run of one process with as many devices as two processes have."""
    run(*TRAIN, f"--model_dir={home / 'alone'}", "--mesh=data=4", JAX_NUM_CPU_DEVICES="4")
    return home / "alone"


@pytest.fixture(scope="module")
def assert_close():
    """Fails if two runs differ at a step by more than rounding."""

    def check(directory, expected, step):
        items = ["model_params", "optimizer_state"]
        trees = [store.load(path, step=step, items=items) for path in (directory, expected)]
        a, b = ({item: tree[item] for item in items} for tree in trees)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), a, b)

    return check
