import pathlib

import pytest

import tekoa
from tekoa.estimator.cli import main
from tekoa.estimator.replay.segment import ReplayError
from tekoa.store.formats import index
from tekoa.testing import assert_trees_equal

MODEL = pathlib.Path(__file__).parent / "rated_model.py"


def test_the_command_replays_and_compares(trained, capsys):
    assert main.main(["replay", str(trained), "--from=10", "--to=20"]) == 0
    out = capsys.readouterr().out
    assert "Replayed steps 10 to 20, loss " in out
    assert "The result has the same bits as " in out


def test_the_loss_is_the_one_that_the_run_recorded(trained, capsys):
    assert main.main(["replay", str(trained), "--from=10"]) == 0
    out = capsys.readouterr().out
    loss = index.read_index(trained / "checkpoint_20").metrics["train/loss"]
    assert f"loss {loss:.6g}." in out


def test_the_result_can_be_saved_elsewhere(trained, tmp_path, capsys):
    out = tmp_path / "out"
    assert main.main(["replay", str(trained), "--to=15", f"--out={out}"]) == 0
    assert "Replayed steps 10 to 15" in capsys.readouterr().out
    saved = tekoa.load_checkpoint(out)
    assert saved["step"] == 15
    replayed = tekoa.replay(trained, stop=15)
    assert_trees_equal(dict(replayed.model_params), saved["model_params"])
    assert main.main(["replay", str(trained), f"--out={out}"]) == 2
    assert "Replayed" not in capsys.readouterr().out  # Before any step is trained.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "does not exist"),
        (["{run}", "--from=20", "--to=20"], "nothing to replay"),
        (["{run}", "--frm=2"], "does not know '--frm=2'. Did you mean '--from'?"),
        (["{run}", "--from=-1"], "negative"),
        ([], "required: RUN"),
    ],
)
def test_mistakes_are_reported(trained, capsys, arguments, message):
    assert main.main(["replay", *(a.format(run=trained) for a in arguments)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "result"), [("replay", "same bits"), ("verify", "All bits agree")]
)
def test_a_generator_is_made_again_for_the_same_bits(generated, capsys, command, result):
    assert main.main([command, str(generated)]) == 0
    assert result in capsys.readouterr().out


def test_steps_after_the_end_of_a_generator_are_refused_by_name(generated, capsys):
    assert main.main(["why", str(generated)]) == 2
    error = capsys.readouterr().err
    assert "iterable generator is an iterator and can be read only once" in error
    assert "Pass an iterable or a function instead." in error


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """A run of two checkpoints on data that can be read only once."""
    directory = tmp_path_factory.mktemp("generated")
    text = MODEL.read_text().replace('"train_shuffle_buf": 100,', "")
    file = directory / "generated_model.py"
    file.write_text(f"{text}\n\nopen_source = open_data\n\n\n{GENERATOR}")
    words = ["train", str(file), f"--model_dir={directory}/run", "--max_train_steps=10"]
    assert main.main(words) == 0
    return directory / "run"


GENERATOR = """
def open_data(config, pattern, *, train):
    return (dict(row) for row in open_source(config, pattern, train=train))
"""


def test_steps_after_the_end_of_the_data_cannot_be_replayed(trained):
    with pytest.raises(ReplayError, match="step 0 to step 0"):
        tekoa.replay(trained, start=0, stop=0)
