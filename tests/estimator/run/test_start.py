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
from tekoa.estimator.cli import flags as flags_lib
from tekoa.estimator.cli import main
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.run import start
from tekoa.extensions import checkpoint_files
from tekoa.store import errors, t5x
from tekoa.store.commit import paths
from tekoa.store.transfer import copy
from tekoa.testing import assert_trees_equal

TINY = str(pathlib.Path(__file__).parents[1] / "tiny_model.py")
INPUTS = (jnp.ones((1, 2)),)


def make_state(optimizer, *, seed=0, n_outputs=2, ema=None):
    """Creates a state as a loop initialises it."""
    w = jax.random.normal(jax.random.key(seed), (2, n_outputs))
    fns = model_fns({"w": w, "b": w[0] + 1}, lambda p, x: x @ p["w"] + p["b"])
    return steps.init_state(fns, optimizer, jax.random.key(seed), inputs=INPUTS, ema=ema)


def write(directory, state, step, format="native", **meta):
    items = checkpoint_files.items_of(state.replace(step=jnp.int32(step)))
    with store.Store(directory, format=format, keep=[store.KeepLast(9)]) as opened:
        opened.save(step, items, meta=meta)
        opened.wait()
    return paths.step_dir(directory, step)


def read(model_dir, fresh, *flags, optimizer=None):
    _, parsed = flags_lib.parse(list(flags))
    module = types.ModuleType("model")
    run = types.SimpleNamespace(config=parsed, model_dir=model_dir, module=module)
    reader = start.StartReader(
        run, "model", optimizer=optimizer or optax.adam(0.1), data_state={"next": 0}
    )
    restored = reader.restore(jax.eval_shape(lambda: fresh))
    if not callable(restored.state):
        return restored
    return dataclasses.replace(restored, state=restored.state(fresh))


def prodigy():
    """An optimizer that keeps a copy of the parameters in its state."""
    return optax.contrib.prodigy(0.1)


@pytest.mark.parametrize("format", ["native", "t5x"])
@pytest.mark.parametrize("with_step", [False, True])
def test_parameters_of_another_run_are_loaded(tmp_path, capsys, format, with_step):
    other, fresh = make_state(optax.adam(0.1), seed=1), make_state(prodigy(), ema=0.9)
    path = write(tmp_path / "other", other, 7, format, data_state={"next": 70})
    flags = [f"--checkpoint_path={path}", "--train_load_step"][: 1 + with_step]
    restored = read(tmp_path / "run", fresh, *flags, optimizer=prodigy())
    assert_trees_equal(restored.state.params, other.params)
    assert_trees_equal(restored.state.average, other.params)
    assert_trees_equal(restored.state.opt_state, prodigy().init(other.params))
    assert int(restored.state.step) == (7 if with_step else 0)
    assert restored.data_state == {"next": 0}
    new = "optimizer and data" if with_step else "optimizer, data and step"
    message = f"Warm start from {path}: loaded 2 of 2 arrays; {new} start from scratch."
    assert message in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_donated_arrays_are_not_shared(tmp_path):
    path = write(tmp_path / "other", make_state(optax.adam(0.1), seed=1), 7)
    fresh = make_state(prodigy(), ema=0.9)
    restored = read(tmp_path / "run", fresh, f"--checkpoint_path={path}", optimizer=prodigy())
    pointers = [
        x.unsafe_buffer_pointer() for x in jax.tree.leaves(restored.state.replace(rng=None))
    ]
    assert len(pointers) == len(set(pointers))


def test_mismatching_arrays_are_listed_or_keep_their_initial_values(tmp_path, capsys):
    path = write(tmp_path / "other", make_state(optax.adam(0.1), n_outputs=3), 7)
    fresh = make_state(optax.adam(0.1))
    params = {**fresh.params, "new": jnp.ones(2), "b": jnp.zeros(3)}
    fresh = fresh.replace(params=params, opt_state=optax.adam(0.1).init(params))
    with pytest.raises(errors.MismatchError, match=r"w +other shape +float32\[2,3\]") as error:
        read(tmp_path / "run", fresh, f"--checkpoint_path={path}")
    assert "--allow_mismatch" in str(error.value)
    restored = read(tmp_path / "run", fresh, f"--checkpoint_path={path}", "--allow_mismatch")
    np.testing.assert_array_equal(restored.state.params["w"], fresh.params["w"])
    np.testing.assert_array_equal(
        restored.state.params["b"], make_state(optax.adam(0.1), n_outputs=3).params["b"]
    )
    output = capsys.readouterr().out
    assert "not in the checkpoint (initial values kept): model_params/new" in output
    assert "other shape or dtype (initial values kept): model_params/w" in output


def test_a_checkpoint_of_another_model_is_rejected(tmp_path):
    fresh = make_state(optax.adam(0.1))
    path = write(tmp_path / "other", fresh.replace(params={"x": jnp.ones(1)}), 7)
    with pytest.raises(errors.MismatchError, match=f"{path}: No parameter"):
        read(tmp_path / "run", fresh, f"--checkpoint_path={path}")


def test_a_run_resumes_from_its_own_checkpoints(tmp_path, capsys):
    own, other = make_state(optax.adam(0.1), seed=1), make_state(optax.adam(0.1), seed=2)
    write(tmp_path / "run", own, 3)
    path = write(tmp_path / "other", other, 7)
    restored = read(tmp_path / "run", make_state(optax.adam(0.1)), f"--checkpoint_path={path}")
    assert_trees_equal(restored.state.params, own.params)
    assert int(restored.state.step) == 3
    message = (
        f"Ignoring --checkpoint_path={path} because --model_dir already contains checkpoints. "
        f"Use a new --model_dir to start from {path}.\n"
    )
    assert message in capsys.readouterr().out
    # The checkpoint it once started from may be gone.
    shutil.rmtree(path.parent)
    restored = read(tmp_path / "run", make_state(optax.adam(0.1)), f"--checkpoint_path={path}")
    assert_trees_equal(restored.state.params, own.params)
    assert message in capsys.readouterr().out


def test_a_best_checkpoint_is_resumed_completely_unless_the_run_is_ahead(tmp_path):
    best = make_state(optax.adam(0.1), seed=1)
    path = write(tmp_path / "eval" / "high_accuracy", best, 7, data_state={"next": 70})
    restored = read(tmp_path, make_state(optax.adam(0.1)), f"--checkpoint_path={path.parent}")
    assert_trees_equal(restored.state, best.replace(step=jnp.int32(7)))
    assert restored.data_state == {"next": 70}
    write(tmp_path, make_state(optax.adam(0.1), seed=2), 9)
    restored = read(tmp_path, make_state(optax.adam(0.1)), f"--checkpoint_path={path}")
    assert int(restored.state.step) == 9


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_steps_written_by_jestimator_are_resumed(tmp_path, capsys, has_optimizer):
    stored = make_state(optax.adam(0.1), seed=1)
    tree = {"target": stored.params, "state": {"step": np.int32(12)}}
    if has_optimizer:
        packed = {"0": dict(stored.opt_state[0]._asdict())}
        packed["0"]["count"] = jnp.int32(12)
        tree["state"]["param_states"] = packed
    path = t5x.write(tmp_path, 12, tree)
    (path / paths.MANIFEST).unlink()
    restored = read(tmp_path, make_state(optax.adam(0.1), ema=0.9))
    assert_trees_equal(restored.state.params, stored.params)
    assert_trees_equal(restored.state.average, stored.params)
    assert int(restored.state.step) == 12
    assert int(restored.state.opt_state[0].count) == (12 if has_optimizer else 0)
    output = capsys.readouterr().out
    assert ("optimizer_state" in output) == (not has_optimizer)
    assert f"{path} contains no " in output
    assert "rng" in output
    assert "; it is initialised from scratch." in output


@pytest.mark.parametrize("name", ["nothing", "file"])
def test_a_path_that_is_not_a_checkpoint_is_a_usage_error(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=name):
        read(tmp_path, make_state(optax.adam(0.1)), f"--checkpoint_path={tmp_path / name}")


def test_training_starts_from_a_t5x_checkpoint(tmp_path, capsys):
    assert main.main(["train", TINY, f"--model_dir={tmp_path / 'first'}"]) == 0
    copy.convert(tmp_path / "first", tmp_path / "t5x", format="t5x")
    path = tmp_path / "t5x" / "checkpoint_6" / "checkpoint"
    flags = [f"--checkpoint_path={path}", "--train_load_step", "--max_train_steps=8"]
    command = ["train", TINY, f"--model_dir={tmp_path / 'second'}", *flags]
    assert main.main(command) == 0
    assert "loaded 6 of 6 arrays" in capsys.readouterr().out
    assert paths.list_steps(tmp_path / "second") == [6, 8]
    loaded, source = (
        store.load(tmp_path / name, step=6)["model_state"] for name in ("second", "first")
    )
    assert_trees_equal(loaded, source)
    shutil.rmtree(tmp_path / "second" / "checkpoint_8")
    assert main.main(command) == 0
    assert "Ignoring --checkpoint_path=" in capsys.readouterr().out


def test_a_step_with_another_optimizer_is_rejected_with_advice(tmp_path):
    path = write(tmp_path / "best", make_state(optax.adam(0.1), seed=1), 7)
    fresh = make_state(optax.sgd(0.1, momentum=0.9))
    with pytest.raises(errors.MismatchError, match=r"optimizer_state/0/mu(.|\n)*--model_dir=NEW"):
        read(tmp_path, fresh, f"--checkpoint_path={path}")
