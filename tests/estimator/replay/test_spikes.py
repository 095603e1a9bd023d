"""Spikes of the loss; those of complete runs are in test_why.py."""

import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tekoa
from tekoa.estimator.cli import main
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.replay import spikes
from tekoa.estimator.replay.segment import Replayer

PATH = pathlib.Path(__file__).parent / "planted.py"
_spec = importlib.util.spec_from_file_location("planted", PATH)
planted = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(planted)


def test_noise_of_batches_with_one_row_is_no_spike():
    """The loss of a row is a squared error: three times its usual value is nothing unusual."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        history = dict(enumerate(rng.normal(size=30) ** 2 * np.linspace(1, 0.5, 30)))
        assert all(spikes.rise_of(history, i, history[i + 1]) is None for i in range(10, 29))


def test_a_rise_beyond_the_noise_is_a_spike():
    rng = np.random.default_rng(0)
    history = dict(enumerate(np.exp(rng.normal(size=30) / 5)))
    assert spikes.rise_of(history, 29, 3.5 * max(history[i] for i in range(26, 30)))
    assert spikes.rise_of(history, 29, 2.5 * max(history[i] for i in range(26, 30))) is None


def test_a_loss_that_varies_close_to_zero_is_not_a_spike(tmp_path):
    """As of a model that has learned its data by heart."""
    losses = {8: 5e-4, 12: 1.3e-2, 16: 2e-4}
    with tekoa.store.Store(tmp_path, keep=[tekoa.store.KeepLast(9)]) as store:
        for step, loss in losses.items():
            params = {"w": jnp.ones(2)}
            store.save(step, {"model_params": params}, metrics={"train/loss": loss})
    replayer = Replayer(tmp_path, lambda read: None)
    assert spikes.explain(replayer)  # As if the run had begun at a loss of 5e-4.
    lines = [
        json.dumps({"step": 2, "train/loss": 1.5}),
        json.dumps({"step": 8, "train/loss": 5e-4}),
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert spikes.explain(replayer) == []


def test_a_spike_is_reported_with_the_layer_that_changed(tmp_path):
    def spoil(state):
        params = jax.tree.map(jnp.copy, state.params)
        params["last"]["kernel"] = 100 * params["last"]["kernel"]
        return state.replace(params=params)

    make_loop = planted.save_run(tmp_path, planted.Net(), planted.rows(), spoil=spoil)
    loop = make_loop(lambda model: tekoa.CheckpointFileReader(tmp_path, model))
    writer = tekoa.CheckpointFileWriter(tmp_path, keep=9, run_file=False)
    for checkpoint in loop.until(8):
        writer(checkpoint)
    writer.close()
    lines = tekoa.why(tmp_path, make_loop).findings
    assert "Between steps 4 and 8 the loss rose" in lines[0]


def test_a_run_that_diverged_before_its_first_check_is_reported(tmp_path):
    """Its loss stays at the height where it is first recorded."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e6))
    make_loop = planted.save_run(tmp_path, planted.Net(), planted.rows(), optimizer=optimizer)
    replayer = Replayer(tmp_path, make_loop)
    assert spikes.explain(replayer) == []
    rise, norm = tekoa.why(tmp_path, make_loop).findings
    assert rise.startswith("Between steps 0 and 4 the loss rose from 1.7")
    assert norm.startswith("The norm that changed most is that of ")


@pytest.mark.slow
def test_a_run_whose_first_start_is_out_of_reach_is_explained_without_it(tmp_path, capsys):
    file, directory = tmp_path / "rated_model.py", tmp_path / "run"
    file.write_text(PATH.with_name("rated_model.py").read_text())
    words = ["train", str(file), f"--model_dir={directory}", "--noprogress"]
    assert main.main([*words, "--max_train_steps=10"]) == 0
    for copy in (directory / "source").iterdir():
        copy.unlink()
    file.write_text(file.read_text() + "# Changed.\n")
    assert main.main([*words, "--max_train_steps=20"]) == 0
    with pytest.raises(UsageError, match="has changed since"):
        Replayer(directory).loop_at(0)
    capsys.readouterr()
    assert main.main(["why", str(directory)]) == 1
    assert capsys.readouterr().out == "All steps are finite.\n"
