import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa import TrainLoop, TrainTask
from tekoa.store.commit import paths
from tekoa.testing import kill_worker

DATA = [(np.full((2, 2), i, np.float32), np.full(2, i, np.float32)) for i in range(6)]
PLAN = {"n_steps": None, "signal": 0, "aim": 0, "delay": 0.0}


def make_loop(reader):
    task = TrainTask(
        apply=lambda params, x: x @ params["w"],
        optimizer=optax.sgd(0.01),
        loss=lambda out, y: jnp.mean((out - y) ** 2),
        data=DATA,
    )
    return TrainLoop(reader({"w": jnp.ones(2)}), task, n_steps_per_checkpoint=2, n_steps=6)


def test_a_run_without_a_signal_records_every_checkpoint(tmp_path):
    path = f"{__file__}:make_loop"
    assert kill_worker.train(path, tmp_path, {**PLAN, "n_steps": 4}) == 0
    assert kill_worker.train(path, tmp_path, PLAN) == 0
    notes = [json.loads(line) for line in (tmp_path / "notes").read_text().split("\n") if line]
    assert [(note["start"], note["step"]) for note in notes] == [(0, 2), (0, 4), (4, 6)]
    assert {"model_params/w", "rng", "loss", "metrics/train/loss"} <= set(notes[0]["digests"])
    assert paths.list_steps(tmp_path) == [2, 4, 6]


def test_functions_are_imported_by_module_or_file(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 3\n")
    (tmp_path / "mine.py").write_text("import beside\n\ndef f():\n    return beside.VALUE\n")
    assert kill_worker.import_function(f"{tmp_path / 'mine.py'}:f")() == 3
    assert kill_worker.import_function("json:dumps") is json.dumps
    with pytest.raises(ValueError, match="'f' is not 'module:function'"):
        kill_worker.import_function("f")


def test_one_bit_changes_one_digest():
    loop = make_loop(lambda target: target)
    checkpoint = loop.checkpoint()
    params = {"w": jnp.float32([1, np.nextafter(np.float32(1), np.float32(2))])}
    other = loop.checkpoint().state.replace(params=params)
    a = kill_worker.digests(checkpoint)
    b = kill_worker.digests(type(checkpoint)(**{**vars(checkpoint), "state": other}))
    assert [name for name in a if a[name] != b[name]] == ["model_params/w"]
    assert "seconds_per_step" not in str(sorted(a))
    assert jax.dtypes.issubdtype(checkpoint.rng.dtype, jax.dtypes.prng_key)


@pytest.mark.parametrize(("aim", "last"), [(4, 4), (9, 6)])
def test_the_signal_is_sent_once_after_its_step(monkeypatch, aim, last):
    signals = []
    monkeypatch.setattr(kill_worker.os, "kill", lambda pid, number: signals.append(number))
    delayed_signal = kill_worker.DelayedSignal({"signal": 9, "aim": aim, "delay": 0.5})
    for step in (2, 4, 6):
        delayed_signal.reached(step, 0.001)
        if delayed_signal._thread is not None:
            break
    assert step == last
    delayed_signal.wait()
    delayed_signal.reached(8, 0.001)
    delayed_signal.wait()
    assert signals == [9]
