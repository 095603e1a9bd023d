"""Samples by the command: the same in every log, and each once after kills."""

import html
import json
import signal

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from support.processes import TINY_MODEL, Command
from tekoa.estimator.cli import main
from tekoa.models import sample_text
from tekoa.store.read.json_lines import read_texts

SMALL = {
    "transformer_lm": ["n_layers=1", "width=16", "n_heads=2", "seq_length=16"],
    "lstm_lm": ["model_config.hidden_size=8", "model_config.memory_size=8", "seq_length=16"],
}


def words(model, directory, *flags):
    return [
        *("train", str(model), f"--model_dir={directory}", "--random_seed=3", "--noprogress"),
        *("--max_train_steps=25", "--check_every_steps=5", "--train_batch_size=4"),
        *("--num_valid_examples=4", "--sample_tokens=30"),
        *(f"--module_config.{setting}" for setting in SMALL.get(model, [])),
        *flags,
    ]


def tensorboard_texts(directory):
    reader = EventAccumulator(str(directory), size_guidance={"tensors": 0})
    reader.Reload()
    return [(x.step, x.tensor_proto.string_val[0].decode()) for x in reader.Tensors("sample")]


@pytest.mark.parametrize(
    "model", ["transformer_lm", pytest.param("lstm_lm", marks=pytest.mark.slow)]
)
def test_samples_are_in_every_log(model, tmp_path, capsys):
    flags = ["--sample_every=10", "--sample_prompt=david sees", "--json"]
    assert main.main(words(model, tmp_path, *flags)) == 0
    captured = capsys.readouterr()
    texts = {step: by_name["sample"] for step, by_name in read_texts(tmp_path).items()}
    assert list(texts) == [0, 10, 20, 25]
    # Words of the vocabulary, more than the model sees at once.
    vocabulary = {*sample_text.vocabulary()}
    for text in texts.values():
        lines = [line.split(" ") if line else [] for line in text.split("\n")]
        assert lines[0][:2] == ["david", "sees"]
        assert sum(map(len, lines)) + len(lines) - 1 == 32
        assert {word for line in lines for word in line} <= vocabulary
    assert tensorboard_texts(tmp_path / "train") == list(texts.items())
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert {row["step"]: row["sample"] for row in rows if "sample" in row} == texts
    assert f"sample at step 10:\n{texts[10]}\n" in captured.err
    assert main.main(["page", str(tmp_path), "--out=-"]) == 0
    assert f"<pre>{html.escape(texts[25])}</pre>" in capsys.readouterr().out


@pytest.mark.slow
def test_each_sample_is_there_once_after_kills(tmp_path):
    killed = tmp_path / "killed"
    directories = tmp_path / "complete", killed
    flags = ["--sample_every=5", "--sample_top_p=0.9", "--sample_temperature=1.2"]
    for step in (10, 20):
        command = Command(words("transformer_lm", killed, *flags), tmp_path / "log")
        command.wait_until((killed / f"checkpoint_{step}").exists)
        command.send(signal.SIGKILL)
        command.wait()
    for directory in directories:
        command = Command(words("transformer_lm", directory, *flags), tmp_path / "log")
        code, _ = command.wait()
        assert code == 0, command.output()
    rows = [(directory / "texts.jsonl").read_text() for directory in directories]
    assert rows[0] == rows[1]
    assert [json.loads(row)["step"] for row in rows[0].splitlines()] == [0, 5, 10, 15, 20, 25]
    # TensorBoard discards what came after the step from which a start resumed.
    texts = [tensorboard_texts(directory / "train") for directory in directories]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 6


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        (TINY_MODEL, ["--sample_every=5"], "Set `text` of its Experiment to a TextFns"),
        ("lstm_lm", ["--sample_every=7"], "must be a multiple of --check_every_steps=5"),
        ("lstm_lm", ["--sample_top_p=0.5"], "--sample_tokens needs --sample_every=STEPS"),
        ("lstm_lm", ["--sample_every=5", "--sample_top_p=0"], "top_p must be above 0"),
        (
            "lstm_lm",
            ["--sample_every=5", "--sample_prompt=unicorns"],
            "the prompt, line 1: the word 'unicorns' is not in the sample's vocabulary",
        ),
    ],
)
def test_mistakes_are_named(model, flags, message, tmp_path, capsys):
    assert main.main(words(model, tmp_path / "run", *flags)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
