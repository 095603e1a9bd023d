import shutil
import time

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import tekoa
from tekoa import hosts, store
from tekoa.store import errors
from tekoa.store.mirror import mirror, publisher
from tekoa.store.mirror.objects import Objects


def save(directory, *steps, value=None):
    with store.Store(directory, keep=[store.KeepLast(9)]) as writer:
        for step in steps:
            writer.save(step, {"w": np.full(3, float(value or step))}, replace=value is not None)


def test_local_directories_are_left_alone(tmp_path, cache):
    with store.mirrored(tmp_path / "run") as directory:
        assert directory == tmp_path / "run"
    assert store.fetched(tmp_path / "run") == tmp_path / "run"
    assert not cache.exists()


def test_a_run_is_written_and_read(url):
    with store.mirrored(url) as directory:
        save(directory, 1, 2)
        save(directory / "save", 7)
    assert store.load(url)["w"].tolist() == [2.0] * 3
    assert store.load(url, step=1)["w"].tolist() == [1.0] * 3
    assert store.load(f"{url}/save/checkpoint_7/")["step"] == 7
    assert store.load(f"{url}/save")["step"] == 7
    assert [(info.step, info.problem) for info in store.inspect(url)] == [(1, ""), (2, "")]
    assert store.fetched(url).name == "run"
    assert mirror.shown(store.fetched(f"{url}/save")) == f"{url}/save"


def test_nothing_at_a_url_is_nothing_on_disk(url):
    assert not store.fetched(url).exists()
    with pytest.raises(errors.StoreError, match="contains no checkpoint"):
        store.load(url)


def test_a_directory_of_another_writer_in_the_run_is_read_with_it(url):
    with store.mirrored(url) as directory, store.mirrored(f"{url}/eval") as results:
        assert not results.is_relative_to(directory)
        save(directory, 1)
        save(results / "high_accuracy", 1)
        (results / "evaluations.jsonl").write_text("{}")
        (directory / "run.json").write_text("{}")
    path = store.fetched(url)
    assert (path / "eval" / "evaluations.jsonl").read_text() == "{}"
    best = store.fetched(f"{url}/eval/high_accuracy")
    assert store.load(best)["step"] == 1
    assert (best.parents[1] / "run.json").exists()


def test_several_processes_have_no_memory_in_common(url, monkeypatch, cache):
    monkeypatch.setattr(mirror.hosts, "current", lambda: hosts.Hosts(index=0, count=2))
    with pytest.raises(errors.StoreError, match="2 train together"):
        store.mirrored(url).__enter__()
    assert not cache.exists()


def test_an_error_inside_is_the_one_that_is_raised(url, caplog, monkeypatch):
    def fail(self):
        raise errors.UnreachableError("the server is down.")

    monkeypatch.setattr(publisher.Publisher, "_publish", fail)
    with pytest.raises(ZeroDivisionError), store.mirrored(url, grace_seconds=0.05) as directory:
        _save_and_fail(directory, mirror._publishers[url])
    assert "step 1 is not published. the server is down." in caplog.text


def _save_and_fail(directory, one):
    save(directory, 1)
    while one._problem is None:  # It has tried to publish.
        time.sleep(0.001)
    raise ZeroDivisionError


def test_the_last_state_must_be_published(url, monkeypatch):
    def fail(self):
        raise errors.UnreachableError("the server is down.")

    monkeypatch.setattr(publisher.Publisher, "_publish", fail)
    with (
        pytest.raises(errors.SaveFailedError, match="step 1 is not published"),
        store.mirrored(url, grace_seconds=0.05) as directory,
    ):
        save(directory, 1)


def test_a_damaged_file_of_the_run_is_reported_and_stays_until_it_is_written(
    url, memory, cache, caplog
):
    with store.mirrored(url) as directory:
        (directory / "run.json").write_text('{"random_seed": 1}')
        (directory / "metrics.jsonl").write_text("{}")
    damaged = {name.rpartition("/")[2]: name for name in Objects(url).names_in("files")}
    for name in damaged.values():
        memory.pipe(f"/bucket/run/{name}", b"damage")
    shutil.rmtree(cache)
    path = store.fetched(url)
    assert (path / "run.json").read_text() == "damage"
    store.fetched(url)
    assert caplog.text.count("run.json is damaged") == 1
    caplog.clear()
    with store.mirrored(url) as directory:
        assert (directory / "run.json").read_text() == "damage"
        (directory / "metrics.jsonl").write_text("[]")
    assert "run.json is damaged" in caplog.text
    caplog.clear()
    assert (store.fetched(url) / "metrics.jsonl").read_text() == "[]"
    assert "metrics.jsonl" not in caplog.text
    # Once the object is repaired, all is well.
    memory.pipe(f"/bucket/run/{damaged['run.json']}", b'{"random_seed": 1}')
    with store.mirrored(url) as directory:
        assert (directory / "run.json").read_text() == '{"random_seed": 1}'
    assert "run.json is damaged" not in caplog.text


def test_a_file_of_the_run_that_is_lost_in_the_store_is_left_out(url, memory, cache, caplog):
    with store.mirrored(url) as directory:
        (directory / "run.json").write_text("{}")
        save(directory, 1)
    Objects(url).delete([n for n in Objects(url).names_in("files") if n.endswith("run.json")])
    shutil.rmtree(cache)
    with store.mirrored(url) as directory:
        assert not (directory / "run.json").exists()
    assert "is missing. What is left of it is used." in caplog.text
    caplog.clear()
    assert store.load(store.fetched(url))["step"] == 1
    assert not caplog.text


def test_extensions_write_to_the_working_copy(url):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    data = [(np.ones((4, 2), np.float32), np.ones((4, 1), np.float32))] * 8
    with store.mirrored(url) as directory:
        loop = tekoa.TrainLoop(
            tekoa.CheckpointFileReader(directory, model),
            tekoa.TrainTask(optimizer=optax.sgd(0.1), loss=_loss, data=data),
            n_steps=8,
            n_steps_per_checkpoint=4,
            rng=jax.random.key(0),
            stdout=False,
        )
        writer = tekoa.CheckpointFileWriter(directory)
        process = tekoa.serial(tekoa.TensorBoardWriter(directory / "train"), writer)
        for checkpoint in loop:
            process(checkpoint)
        writer.close()
    assert store.load(url)["step"] == 8
    assert list((store.fetched(url) / "train").glob("events*"))


def _loss(outputs, targets):
    return ((outputs - targets) ** 2).mean()


def test_fit_continues_on_another_machine_with_the_same_bits(memory, cache, tmp_path):
    x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)

    def fit(directory, steps):
        return tekoa.fit(
            nnx.Linear(3, 1, rngs=nnx.Rngs(0)),
            (x, x.sum(axis=1, keepdims=True)),
            loss="mse",
            optimizer=optax.adam(0.1),
            steps=steps,
            validation=0.25,
            steps_per_check=5,
            directory=directory,
            show_progress=False,
        )

    whole = fit(tmp_path / "whole", 20)
    fit("memory://bucket/fit", 10)
    shutil.rmtree(cache)
    result = fit("memory://bucket/fit", 20)
    for a, b in zip(
        jax.tree.leaves(whole.loop.state.params),
        jax.tree.leaves(result.loop.state.params),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    lines = (store.fetched("memory://bucket/fit") / "metrics.jsonl").read_text().splitlines()
    local = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == [line.split(",")[0] for line in local]
    assert store.load("memory://bucket/fit/low_eval_loss")["step"] > 0
