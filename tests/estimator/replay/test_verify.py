import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import pytest

import tekoa
from tekoa import store
from tekoa.estimator.cli import main
from tekoa.estimator.replay import verify
from tekoa.estimator.replay.segment import Replayer, ReplayError
from tekoa.extensions import checkpoint_files
from tekoa.store.read import restore


def forge(directory, step, change):
    """Replaces a step by a changed one, with correct checksums and a new manifest."""
    loop = Replayer(directory).loop_at(step)
    items = checkpoint_files.items_of(loop.state)
    loaded = restore.restore(directory, items, step=step)
    items, meta = change(dict(loaded.items), dict(loaded.meta))
    with store.Store(directory, keep=[store.KeepLast(99)]) as writable:
        writable.save(step, items, meta=meta, replace=True)


def flip(tree, index=0):
    """Changes the lowest bit of one entry of the first array."""
    leaves, treedef = jax.tree.flatten(tree)
    bits = leaves[index].view(jnp.uint32)
    leaves[index] = bits.at[(0,) * bits.ndim].add(1).view(leaves[index].dtype)
    return jax.tree.unflatten(treedef, leaves)


def flip_weight(items, meta):
    return {**items, "model_params": flip(items["model_params"])}, meta


def flip_slot(items, meta):
    return {**items, "optimizer_state": flip(items["optimizer_state"], index=1)}, meta


def change_rng(items, meta):
    return {**items, "rng": jax.random.fold_in(items["rng"], 1)}, meta


def move_data(items, meta):
    position = json.loads(json.dumps(meta["data_state"]))
    position["next"] += 1
    position["batches"]["batch"] += 1
    return items, {**meta, "data_state": position}


FORGERIES = {
    "model_params": flip_weight,
    "optimizer_state": flip_slot,
    "rng": change_rng,
    "another position in the data": move_data,
}


@pytest.mark.parametrize("expected", FORGERIES)
def test_a_forged_step_is_found_by_training_again(run_copy, capsys, expected):
    forge(run_copy, 20, FORGERIES[expected])
    assert main.main(["verify", str(run_copy), "--fraction=1"]) == 65
    lines = capsys.readouterr().out.splitlines()
    (found,) = [line for line in lines if line.startswith("Steps 10 to 20")]
    assert expected in found
    # Step 30 names the digest of the step that was there.
    assert any("Step 30 was written after another step 20" in line for line in lines)
    # What follows is the run's own: only the segments that touch step 20 differ.
    assert not any(line.startswith("Steps 30 to 40") for line in lines)


def test_training_in_secret_with_another_rate_or_data_is_found(train, run_copy, tmp_path):
    for name, value in {"rate": 0.5, "n_bad_rows": 50}.items():
        other = shutil.copytree(run_copy, tmp_path / name)
        for step in (30, 40):
            shutil.rmtree(other / f"checkpoint_{step}")
        record = (other / "run.json").read_text()
        assert train(other, "--max_train_steps=30", f"--module_config.{name}={value}") == 0
        (other / "run.json").write_text(record)  # The forger restores the record.
        result = tekoa.verify(other, fraction=1)
        assert [fault[:15] for fault in result.faults] == ["Steps 20 to 30:"]


def test_an_exchanged_and_a_removed_step_are_found_without_training(
    train, run_copy, trained, tmp_path
):
    other = tmp_path / "other"
    assert train(other, "--random_seed=8") == 0
    shutil.rmtree(run_copy / "checkpoint_20")
    faults = tekoa.verify(run_copy, fraction=0.01, seed=0).faults
    assert faults == ["Step 20 is missing: step 30 was written after it."]
    shutil.copytree(other / "checkpoint_20", run_copy / "checkpoint_20")
    faults = tekoa.verify(run_copy, fraction=0.01, seed=0).faults
    assert any("Step 30 was written after another step 20" in fault for fault in faults)
    assert any("Step 20 was written after another step 10" in fault for fault in faults)


def test_other_code_than_recorded_is_found(run_copy):
    record, other = json.loads((run_copy / "run.json").read_text()), "rated_model-000000000000.py"
    for facts in (record, *record["starts"]):
        facts["sources"] = dict.fromkeys(facts["sources"], other)
    (run_copy / "run.json").write_text(json.dumps(record))
    shutil.copy(next((run_copy / "source").iterdir()), run_copy / "source" / other)
    faults = tekoa.verify(run_copy, fraction=0.01).faults
    assert any("Step 40 was made by" in fault for fault in faults)


def test_a_good_run_has_no_faults(trained, capsys):
    assert main.main(["verify", str(trained), "--fraction=0.5", "--seed=1"]) == 0
    out = capsys.readouterr().out
    assert "Trained 20 of 40 steps again (--seed=1):" in out
    assert "All bits agree" in out
    result = tekoa.verify(trained, fraction=1)
    assert result.segments == [(0, 10), (10, 20), (20, 30), (30, 40)]
    assert dataclasses.asdict(result)["faults"] == []


def test_a_damaged_file_is_named(run_copy, capsys):
    path = next(p for p in (run_copy / "checkpoint_20").iterdir() if p.suffix != ".manifest")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert main.main(["verify", str(run_copy), "--fraction=1"]) == 65
    out = capsys.readouterr().out
    assert "checkpoint_20" in out
    assert "missing" not in out


def test_one_checkpoint_is_not_enough(train, tmp_path):
    assert train(tmp_path / "run", "--max_train_steps=0") == 0
    assert main.main(["verify", str(tmp_path / "run")]) == 2


def test_a_segment_that_is_too_long_is_left_out_and_named(run_copy, capsys):
    """As before the first checkpoint that was kept."""
    for step in (0, 10):
        shutil.rmtree(run_copy / f"checkpoint_{step}")
    assert main.main(["verify", str(run_copy), "--fraction=0.3"]) == 0
    out = capsys.readouterr().out
    assert "Trained 10 of 40 steps again" in out
    assert "Not trained again: steps 0 to 20; without a checkpoint in between, each would be" in out
    assert tekoa.verify(run_copy, fraction=1).segments == [(0, 20), (20, 30), (30, 40)]


def test_below_one_segment_any_of_the_shorter_ones_may_be_trained_again():
    """Not always the shortest, which a forger would know."""
    segments = [(0, 500), (500, 600), (600, 700), (700, 800), (800, 896)]
    limit = verify._limit(segments, 0.01)
    chosen = {tuple(verify._choose(segments, limit, seed)) for seed in range(40)}
    assert chosen == {(segment,) for segment in segments[1:]}


def test_permanent_copies_leave_no_gap_in_the_chain(train, tmp_path):
    flags = ["--max_ckpt=2", "--save_every_steps=20", "--check_every_steps=5"]
    assert train(tmp_path / "run", *flags) == 0
    assert (tmp_path / "run" / "save" / "checkpoint_20").exists()
    assert tekoa.verify(tmp_path / "run", fraction=1).faults == []


def test_a_checkpoint_that_is_removed_meanwhile_is_no_fault(run_copy, monkeypatch):
    """As by a run that is still being trained."""
    choose = verify._choose

    def remove_and_choose(*arguments):
        shutil.rmtree(run_copy / "checkpoint_10")
        return choose(*arguments)

    monkeypatch.setattr(verify, "_choose", remove_and_choose)
    with pytest.raises(ReplayError, match=r"checkpoints \[10\] were removed before they were read"):
        tekoa.verify(run_copy, fraction=1)
