"""The writer: every kind of tree is restored exactly as saved."""

import os
import shutil
import threading
import zlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tekoa import store
from tekoa.estimator.cli.exit_codes import ExitCode
from tekoa.store import errors
from tekoa.store.commit import commit


def bits(leaf):
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), np.asarray(jax.random.key_data(leaf)).tobytes()
    if callable(leaf):
        return leaf
    return str(np.asarray(leaf).dtype), np.asarray(leaf).tobytes()


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert list(map(bits, jax.tree.leaves(actual))) == list(map(bits, jax.tree.leaves(expected)))


def mixed_tree():
    return {
        "bf16": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
        "int4": jnp.arange(-4, 4).astype(jnp.int4),
        "float8": jnp.arange(4).astype(jnp.float8_e4m3fn),
        "bool": np.array([True, False]),
        "complex": jnp.array([1 + 2j], jnp.complex64),
        "scalar": jnp.float32(2.5),
        "float64": np.arange(3, dtype=np.float64),
        "big_endian": np.arange(3, dtype=">i4").astype(np.int32),
        "nothing": None,
        "empty_node": {},
        "empty_array": np.zeros((0, 3), np.float16),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(8, impl="rbg"), 3),
        "python": [1, 2.5, True],
        "a.b": jnp.ones(2),
        "a": {"b": jnp.zeros(2)},
        "": {"with/slash %": jnp.ones(1), "é": jnp.ones(1)},
    }


TREES = {
    "mixed": mixed_tree,
    "optax": lambda: optax.chain(optax.clip(1.0), optax.adam(1e-3)).init({"w": jnp.ones((2, 2))}),
    "nnx": lambda: nnx.state(nnx.Linear(3, 4, rngs=nnx.Rngs(0))),
    "nnx_rngs": lambda: nnx.state(nnx.Dropout(0.5, rngs=nnx.Rngs(0))),
    "equinox": lambda: eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0)),
    "bare_array": lambda: jnp.arange(3.0),
    "nothing": lambda: None,
}


@pytest.mark.parametrize("make", TREES.values(), ids=TREES)
def test_tree_is_restored_bit_for_bit(tmp_path, make):
    tree = make()
    with store.Store(tmp_path) as writer:
        writer.save(3, {"model_params": tree, "other": jnp.ones(2)}, meta={"position": [1, 2]})
        writer.wait()
        restored = writer.restore({"model_params": tree})
    assert restored.step == 3
    assert restored.meta["position"] == [1, 2]
    assert_same(restored.items["model_params"], tree)


def test_restore_of_an_empty_directory_is_none(tmp_path):
    with store.Store(tmp_path / "new") as writer:
        assert writer.restore({"model_params": {}}) is None


def test_later_changes_to_the_trees_are_not_saved(tmp_path):
    array, tree = np.zeros(1000), {}
    tree["w"] = array
    with store.Store(tmp_path) as writer:
        writer.save(1, {"model_params": tree})
        array[:] = 1
        tree["v"] = array
        writer.wait()
        assert_same(
            writer.restore({"model_params": {"w": array}}).items["model_params"]["w"],
            np.zeros(1000),
        )


def test_step_of_an_earlier_run_is_never_overwritten(tmp_path):
    with store.Store(tmp_path) as writer:
        writer.save(1, {"x": jnp.zeros(2)})
    with store.Store(tmp_path, fatal_after=1) as writer:
        writer.save(1, {"x": jnp.ones(2)})
        with pytest.raises(errors.SaveFailedError, match="not overwritten"):
            writer.wait()
        assert store.load(tmp_path)["x"].tolist() == [0, 0]


def test_own_step_is_not_saved_twice(tmp_path):
    with store.Store(tmp_path, fatal_after=1) as writer:
        writer.save(1, {"x": jnp.zeros(2)})
        writer.wait()
        writer.save(1, {"x": jnp.zeros(2)})
    with store.Store(tmp_path, fatal_after=1) as writer:
        writer.restore({"x": jnp.zeros(2)})
        writer.save(1, {"x": jnp.zeros(2)})


def test_only_steps_are_left(tmp_path):
    with store.Store(tmp_path, keep=[store.KeepLast(2)]) as writer:
        for step in range(4):
            writer.save(step, {"x": jnp.zeros(2)})
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_2", "checkpoint_3"]


def test_best_and_newest_are_kept_over_restarts(tmp_path):
    rules = [store.KeepLast(1), store.KeepBest("loss", mode="min")]
    for run in ([0.5, float("nan")], [0.1, float("-inf")], [0.7, 0.6]):
        with store.Store(tmp_path, keep=rules) as writer:
            for loss in run:
                step = max(writer.steps(), default=0) + 1
                writer.save(step, {"x": jnp.zeros(2)}, metrics={"loss": loss})
                writer.wait()
    assert writer.steps() == [3, 6]


def test_meta_accepts_numpy_numbers_and_refuses_objects(tmp_path):
    with store.Store(tmp_path) as writer:
        writer.save(1, {}, meta={"n": np.int32(3), "x": jnp.float32(0.5)})
        writer.wait()
        assert store.load(tmp_path)["meta"] == {"n": 3, "x": 0.5}
        with pytest.raises(TypeError, match="JSON"):
            writer.save(2, {}, meta={"n": object()})


def test_on_commit_is_called_after_the_commit(tmp_path):
    calls = []
    with store.Store(tmp_path) as writer:
        writer.save(
            4,
            {"x": jnp.ones(1)},
            on_commit=lambda step: calls.append((step, (tmp_path / f"checkpoint_{step}").is_dir())),
        )
    assert calls == [(4, True)]


def test_negative_steps_are_refused_immediately(tmp_path):
    with store.Store(tmp_path) as writer, pytest.raises(ValueError, match="negative"):
        writer.save(-1, {})


def test_numpy_steps_and_odd_paths_work(tmp_path):
    odd = tmp_path / "a b%20#ü?"
    with store.Store(odd) as writer:
        writer.save(np.int64(7), {"x": jnp.ones(2)})
    assert store.load(odd)["step"] == 7


def test_deleted_arrays_are_a_reported_failure(tmp_path):
    with store.Store(tmp_path, fatal_after=1) as writer:
        value = jnp.ones(2)
        value.delete()
        writer.save(1, {"x": value})
        with pytest.raises(errors.SaveFailedError, match="deleted"):
            writer.wait()
    assert os.listdir(tmp_path) == []


def test_relative_directory_does_not_follow_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with store.Store("run") as writer:
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        writer.save(1, {"x": jnp.ones(2)})
    assert store.load(tmp_path / "run")["step"] == 1


def test_closing_twice_does_not_release_the_lease_of_another_store(tmp_path):
    first, second = store.Store(tmp_path), store.Store(tmp_path)
    first.close()
    first.close()
    second.save(1, {"x": jnp.ones(2)})
    second.close()
    assert os.listdir(tmp_path) == ["checkpoint_1"]
    with pytest.raises(errors.StoreError, match="closed"):
        first.save(2, {"x": jnp.ones(2)})


def test_failure_to_remove_an_old_step_is_not_a_failed_save(tmp_path, monkeypatch, caplog):
    def refuse(lease, step):
        raise PermissionError("not yours")

    monkeypatch.setattr(commit, "remove", refuse)
    with store.Store(tmp_path, fatal_after=1) as writer:
        for step in (1, 2):
            writer.save(step, {"x": jnp.ones(2)})
    assert writer.steps() == [1, 2]
    assert "could not remove step 1: not yours" in caplog.text


def test_step_that_training_resumed_from_may_count_as_saved(tmp_path):
    with store.Store(tmp_path) as writer:
        writer.save(1, {"x": jnp.zeros(2)})
    committed, parent = [], store.commit_id(tmp_path / "checkpoint_1").digest
    with store.Store(tmp_path, fatal_after=1) as writer:
        options = {"exist_ok": True, "on_commit": committed.append, "parent": parent}
        writer.save(1, {"x": jnp.ones(2)}, **options)
    assert committed == [1]
    assert store.load(tmp_path)["x"].tolist() == [0, 0]


def test_step_of_a_later_version_is_refused_and_left_alone(tmp_path):
    with store.Store(tmp_path, keep=[store.KeepLast(1)]) as writer:
        writer.save(1, {"x": jnp.zeros(2)})
        writer.wait()
        path = tmp_path / "checkpoint_2"
        shutil.copytree(tmp_path / "checkpoint_1", path)
        body = b'{"version": 2, "step": 2, "unknown": 0}'
        (path / "tekoa.manifest").write_bytes(body + b"\n%08x\n" % zlib.crc32(body))
        with pytest.raises(errors.NewerVersionError, match=r"version 2.*Update Tekoa") as caught:
            writer.restore({"x": jnp.zeros(2)})
        for step in (3, 4):  # Retention does not remove it either.
            writer.save(step, {"x": jnp.zeros(2)})
    assert caught.value.exit_code == ExitCode.NEWER_VERSION
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_2", "checkpoint_4"]
    assert "version 2" in store.inspect(tmp_path)[0].problem


def test_damaged_step_of_an_earlier_run_is_quarantined_and_saved_again(tmp_path):
    with store.Store(tmp_path) as writer:
        writer.save(1, {"x": jnp.zeros(2)})
    (tmp_path / "checkpoint_1" / "tekoa.json").write_text("{}")
    with store.Store(tmp_path, fatal_after=1) as writer:
        writer.save(1, {"x": jnp.ones(2)}, exist_ok=True)
    assert store.load(tmp_path)["x"].tolist() == [1, 1]
    assert len(list(tmp_path.glob("checkpoint_1.bad-*"))) == 1


def test_a_restore_quarantines_newer_damaged_steps(tmp_path):
    with store.Store(tmp_path, keep=[store.KeepLast(9)]) as writer:
        for step in (1, 2):
            writer.save(step, {"x": jnp.full(2, step)})
    (tmp_path / "checkpoint_2" / "tekoa.json").write_text("{}")
    with store.Store(tmp_path) as writer:
        assert writer.restore({"x": jnp.zeros(2, int)}).step == 1
        assert writer.steps() == [1]
    assert len(list(tmp_path.glob("checkpoint_2.bad-*"))) == 1


def test_steps_that_are_set_aside_no_longer_count(tmp_path):
    with store.Store(tmp_path, keep=[store.KeepLast(9)]) as writer:
        for step in (1, 2, 3):
            writer.save(step, {"x": jnp.full(2, step)})
        writer.wait()
        assert writer.set_aside([2, 3]) == tmp_path / "set_aside-3"
        assert writer.steps() == [1]
        assert writer.restore({"x": jnp.zeros(2, int)}).step == 1
    assert store.load(tmp_path / "set_aside-3")["x"].tolist() == [3, 3]


def test_error_in_the_with_block_is_not_hidden_by_a_failed_save(tmp_path, caplog):
    value = jnp.ones(2)
    value.delete()

    def body():
        with store.Store(tmp_path) as writer:
            writer.save(1, {"x": value})
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        body()
    assert "saving step 1 failed" in caplog.text


def test_slow_save_option_is_checked(tmp_path):
    with pytest.raises(ValueError, match="'wait' or 'skip', got 'never'"):
        store.Store(tmp_path, on_slow_save="never")


def test_two_threads_may_save_into_one_store(tmp_path):
    with store.Store(tmp_path, keep=[store.KeepEvery(1)], fatal_after=1) as writer:

        def save(steps):
            for step in steps:
                writer.save(step, {"x": np.full(2, step)})

        threads = [threading.Thread(target=save, args=(range(i, 12, 2),)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert writer.steps() == list(range(12))
    assert [store.load(tmp_path, step=n)["x"][0] for n in range(12)] == list(range(12))


def test_store_whose_save_is_stuck_closes_in_time_and_keeps_its_lease(tmp_path, monkeypatch):
    gate = threading.Event()
    commit_now = commit.commit

    def stuck(*args, **options):
        gate.wait(60)
        return commit_now(*args, **options)

    monkeypatch.setattr(commit, "commit", stuck)
    writer = store.Store(tmp_path, grace_seconds=0.05)
    writer.save(1, {"x": np.ones(1)})
    with pytest.raises(errors.SaveFailedError, match=r"step 1 did not end within 0\.05 seconds"):
        writer.close()
    gate.set()
    writer._saver.wait()
    assert writer.steps() == [1]  # It still had the right to commit.
