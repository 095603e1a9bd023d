import dataclasses
import pathlib
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa import store
from tekoa.bridges.functions import model_fns
from tekoa.core import step as steps
from tekoa.estimator import cli, config, start
from tekoa.estimator.config import UsageError
from tekoa.extensions import files
from tekoa.store import converting, errors, names, t5x
from tekoa.testing import assert_trees_equal

TINY = str(pathlib.Path(__file__).parent / "tiny_model.py")
INPUTS = (jnp.ones((1, 2)),)


def made(optimizer, *, seed=0, n_outputs=2, ema=None):
    """A state as a loop initialises it."""
    w = jax.random.normal(jax.random.key(seed), (2, n_outputs))
    fns = model_fns({"w": w, "b": w[0] + 1}, lambda p, x: x @ p["w"] + p["b"])
    return steps.init_state(fns, optimizer, jax.random.key(seed), inputs=INPUTS, ema=ema)


def write(directory, state, step, layout="tekoa", **meta):
    items = files.items_of(state.replace(step=jnp.int32(step)))
    with store.Store(directory, layout=layout, keep=[store.KeepLast(9)]) as opened:
        opened.save(step, items, meta=meta)
        opened.wait()
    return names.step_dir(directory, step)


def read(model_dir, fresh, *flags, optimizer=None):
    _, parsed = config.parse(list(flags))
    run = types.SimpleNamespace(config=parsed, model_dir=model_dir)
    reader = start.StartReader(
        run, "model", optimizer=optimizer or optax.adam(0.1), data_state={"next": 0}
    )
    found = reader.restore(jax.eval_shape(lambda: fresh))
    return dataclasses.replace(found, state=found.state(fresh)) if callable(found.state) else found


def schedule_free():
    """Keeps a copy of the parameters in its state."""
    return optax.contrib.schedule_free_adamw(0.1)


@pytest.mark.parametrize("layout", ["tekoa", "t5x"])
@pytest.mark.parametrize("takes_step", [False, True])
def test_parameters_of_another_run_are_taken(tmp_path, capsys, layout, takes_step):
    other, fresh = made(optax.adam(0.1), seed=1), made(schedule_free(), ema=0.9)
    path = write(tmp_path / "other", other, 7, layout, data_state={"next": 70})
    flags = [f"--checkpoint_path={path}", "--train_load_step"][: 1 + takes_step]
    found = read(tmp_path / "run", fresh, *flags, optimizer=schedule_free())
    assert_trees_equal(found.state.params, other.params)
    assert_trees_equal(found.state.average, other.params)
    assert_trees_equal(found.state.opt_state, schedule_free().init(other.params))
    assert int(found.state.step) == (7 if takes_step else 0)
    assert found.data_state == {"next": 0}
    assert f"Starts from {path}: 2 of 2 arrays taken" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_nothing_is_shared_between_what_the_step_takes_over(tmp_path):
    path = write(tmp_path / "other", made(optax.adam(0.1), seed=1), 7)
    fresh = made(schedule_free(), ema=0.9)
    found = read(tmp_path / "run", fresh, f"--checkpoint_path={path}", optimizer=schedule_free())
    places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(found.state.replace(rng=None))]
    assert len(places) == len(set(places))


def test_what_does_not_fit_is_listed_or_left_as_initialised(tmp_path, capsys):
    path = write(tmp_path / "other", made(optax.adam(0.1), n_outputs=3), 7)
    fresh = made(optax.adam(0.1))
    params = {**fresh.params, "new": jnp.ones(2), "b": jnp.zeros(3)}
    fresh = fresh.replace(params=params, opt_state=optax.adam(0.1).init(params))
    with pytest.raises(errors.MismatchError, match=r"w +other shape +float32\[2,3\]") as error:
        read(tmp_path / "run", fresh, f"--checkpoint_path={path}")
    assert "--allow_mismatch" in str(error.value)
    found = read(tmp_path / "run", fresh, f"--checkpoint_path={path}", "--allow_mismatch")
    np.testing.assert_array_equal(found.state.params["w"], fresh.params["w"])
    np.testing.assert_array_equal(
        found.state.params["b"], made(optax.adam(0.1), n_outputs=3).params["b"]
    )
    said = capsys.readouterr().out
    assert "for want of one in the checkpoint: model_params/new" in said
    assert "since shape or dtype differ: model_params/w" in said


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    fresh = made(optax.adam(0.1))
    path = write(tmp_path / "other", fresh.replace(params={"x": jnp.ones(1)}), 7)
    with pytest.raises(errors.MismatchError, match=f"{path}: No parameter"):
        read(tmp_path / "run", fresh, f"--checkpoint_path={path}")


def test_a_run_goes_on_from_its_own_checkpoints(tmp_path, capsys):
    own, other = made(optax.adam(0.1), seed=1), made(optax.adam(0.1), seed=2)
    write(tmp_path / "run", own, 3)
    path = write(tmp_path / "other", other, 7)
    found = read(tmp_path / "run", made(optax.adam(0.1)), f"--checkpoint_path={path}")
    assert_trees_equal(found.state.params, own.params)
    assert int(found.state.step) == 3
    said = f"--checkpoint_path={path} is not used: this run has checkpoints of its own"
    assert said in capsys.readouterr().out
    # What it once started from need not be there any more.
    shutil.rmtree(path.parent)
    found = read(tmp_path / "run", made(optax.adam(0.1)), f"--checkpoint_path={path}")
    assert_trees_equal(found.state.params, own.params)
    assert said in capsys.readouterr().out


def test_a_best_checkpoint_is_continued_whole_unless_the_run_is_further(tmp_path):
    best = made(optax.adam(0.1), seed=1)
    path = write(tmp_path / "eval" / "high_accuracy", best, 7, data_state={"next": 70})
    found = read(tmp_path, made(optax.adam(0.1)), f"--checkpoint_path={path.parent}")
    assert_trees_equal(found.state, best.replace(step=jnp.int32(7)))
    assert found.data_state == {"next": 70}
    write(tmp_path, made(optax.adam(0.1), seed=2), 9)
    found = read(tmp_path, made(optax.adam(0.1)), f"--checkpoint_path={path}")
    assert int(found.state.step) == 9


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_steps_of_the_original_runner_are_continued_in_place(tmp_path, capsys, has_optimizer):
    stored = made(optax.adam(0.1), seed=1)
    tree = {"target": stored.params, "state": {"step": np.int32(12)}}
    if has_optimizer:
        packed = {"0": dict(stored.opt_state[0]._asdict())}
        packed["0"]["count"] = jnp.int32(12)
        tree["state"]["param_states"] = packed
    path = t5x.write(tmp_path, 12, tree)
    (path / names.MANIFEST).unlink()
    found = read(tmp_path, made(optax.adam(0.1), ema=0.9))
    assert_trees_equal(found.state.params, stored.params)
    assert_trees_equal(found.state.average, stored.params)
    assert int(found.state.step) == 12
    assert int(found.state.opt_state[0].count) == (12 if has_optimizer else 0)
    said = capsys.readouterr().out
    assert ("optimizer_state" in said) == (not has_optimizer)
    assert "rng" in said


@pytest.mark.parametrize("name", ["nothing", "file"])
def test_a_path_that_is_no_checkpoint_is_a_mistake(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=name):
        read(tmp_path, made(optax.adam(0.1)), f"--checkpoint_path={tmp_path / name}")


def test_training_starts_from_a_t5x_checkpoint(tmp_path, capsys):
    assert cli.main(["train", TINY, f"--model_dir={tmp_path / 'first'}"]) == 0
    converting.convert(tmp_path / "first", tmp_path / "t5x", layout="t5x")
    path = tmp_path / "t5x" / "checkpoint_6" / "checkpoint"
    flags = [f"--checkpoint_path={path}", "--train_load_step", "--max_train_steps=8"]
    command = ["train", TINY, f"--model_dir={tmp_path / 'second'}", *flags]
    assert cli.main(command) == 0
    assert "6 of 6 arrays taken" in capsys.readouterr().out
    assert names.list_steps(tmp_path / "second") == [6, 8]
    taken, source = (
        store.load(tmp_path / name, step=6)["model_state"] for name in ("second", "first")
    )
    assert_trees_equal(taken, source)
    shutil.rmtree(tmp_path / "second" / "checkpoint_8")
    assert cli.main(command) == 0
    assert "is not used" in capsys.readouterr().out


def test_another_optimizer_is_refused_in_place_and_told_what_helps(tmp_path):
    path = write(tmp_path / "best", made(optax.adam(0.1), seed=1), 7)
    fresh = made(optax.sgd(0.1, momentum=0.9))
    with pytest.raises(errors.MismatchError, match=r"optimizer_state/0/mu(.|\n)*--model_dir=NEW"):
        read(tmp_path, fresh, f"--checkpoint_path={path}")
