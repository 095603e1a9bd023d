"""A22 on the loop: a run saved on 8 devices goes on on any other mesh, and says so."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tekoa
from tekoa.testing import assert_trees_equal

N_BEFORE, N_AFTER = 20, 100


def init(rng, x):
    return {
        f"w{i}": jax.random.normal(k, (16, 16)) / 4 for i, k in enumerate(jax.random.split(rng))
    }


def apply(params, x):
    return jnp.tanh(x @ params["w0"]) @ params["w1"]


class Data:
    """Batch i is a function of i; the position is saved."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        return self

    def __next__(self):
        x = np.random.default_rng(self.next).normal(size=(16, 16)).astype(np.float32)
        self.next += 1
        return x, np.sin(x)

    def state(self):
        return {"next": self.next}

    def restore(self, state):
        self.next = state["next"]


def make_loop(layout, start=init):
    task = tekoa.TrainTask(
        optimizer=optax.adam(1e-2),
        data=Data(),
        apply=apply,
        loss=lambda y, t: jnp.mean((y - t) ** 2),
    )
    options = {"n_steps_per_checkpoint": N_BEFORE, "grads": False, "steps_per_dispatch": 1}
    return tekoa.TrainLoop(start, task, layout=layout, ema=0.9, **options)


def layout_of(**sizes):
    mesh = tekoa.make_mesh(**sizes)
    return tekoa.Layout(mesh=mesh, rules={"w0": ("fsdp", "model"), "w1": ("model",)})


EIGHT = {"data": 2, "fsdp": 2, "model": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with step 20, its state, and the loss of each step of the whole run."""
    directory = tmp_path_factory.mktemp("saved")
    loop = make_loop(layout_of(**EIGHT))
    checkpoint = loop.next_checkpoint()
    writer = tekoa.CheckpointFileWriter(directory)
    writer(checkpoint)
    writer.close()
    losses = [float(c.loss) for c in loop(n_steps=N_BEFORE + N_AFTER)]
    return directory, jax.device_get(checkpoint.state.params), losses


@pytest.mark.parametrize(
    ("sizes", "now"),
    [
        (EIGHT, ""),
        ({"data": 4}, "data=4 (4 devices)"),
        ({"data": 2, "model": 2}, "data=2, model=2 (4 devices)"),
        ({"data": 1}, "1 device"),
        (None, "1 device"),
    ],
    ids=["same", "4", "2x2", "mesh of 1", "1"],
)
def test_a_run_goes_on_on_another_mesh(saved, sizes, now, caplog):
    directory, params, losses = saved
    layout = None if sizes is None else layout_of(**sizes)
    reader = tekoa.CheckpointFileReader(directory, target=init)
    with caplog.at_level("INFO", "tekoa"):
        loop = make_loop(layout, reader)
    assert loop.step == N_BEFORE
    assert_trees_equal(jax.device_get(loop.state.params), params)
    (line,) = [r.getMessage() for r in caplog.records if "Resuming" in r.getMessage()]
    was = " Saved on data=2, fsdp=2, model=2 (8 devices), now running on "
    assert line == "Resuming from step 20." + (f"{was}{now}." if now else "")
    found = [float(c.loss) for c in loop(n_steps=N_BEFORE + N_AFTER)]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    if sizes == EIGHT:
        assert found == losses
