"""The code and the commands of JEstimator's README run with only names of modules changed.

The README is not part of the project: without it beside the checkout there is nothing to run.
"""

import pathlib
import re
import shlex
import sys
import types

import numpy as np
import pytest

from support import files
from tekoa import data
from tekoa.estimator.cli import main
from tekoa.store.commit import paths

README = files.original("amos_and_jestimator.md")
# The embedded digits take the place of MNIST, of which this many make 44 batches.
N_EXAMPLES = 1408
MODELS = {"jestimator.models.mnist.mnist": "mnist", "jestimator.models.lstm.lm": "lstm_lm"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not README.exists(), reason=f"no JEstimator README in {README.parent}"),
]


def blocks():
    return re.findall(r"^```\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)


def large_digits(split):
    """Returns the embedded digits with as many pixels as those of MNIST."""
    examples = list(data.load(f"digits://split={split}"))[:N_EXAMPLES]
    images = [np.kron(example["image"][..., 0], np.ones((3, 3), np.uint8)) for example in examples]
    return {
        "image": np.stack([np.pad(16 * image, 2)[..., None] for image in images]),
        "label": np.array([example["label"] for example in examples]),
    }


@pytest.fixture
def tfds(monkeypatch):
    """A `tensorflow_datasets` with the few names that the walk-through uses."""
    builder = types.SimpleNamespace(
        download_and_prepare=lambda: None,
        as_dataset=lambda split, batch_size: large_digits(split),
    )
    module = types.ModuleType("tensorflow_datasets")
    module.builder, module.as_numpy = {"mnist": builder}.get, dict
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)


def test_the_walk_through_learns_digits(tfds, capsys):
    code = [text for text in blocks() if re.search(r"^(import|def|class|@|train_ds)", text)]
    names = {"__name__": "walk_through"}
    changes = {
        "from jestimator import": "from tekoa import",
        "_rng, 60000": f"_rng, {N_EXAMPLES}",
        "60000 //": f"{N_EXAMPLES} //",
        "num_epochs = 9": "num_epochs = 2",
    }
    for text in code:
        for old, new in changes.items():
            text = text.replace(old, new)  # noqa: PLW2901
        exec(compile(text, README.name, "exec"), names)
    accuracies = re.findall(r"epoch: \d, test accuracy: (\S+)", capsys.readouterr().out)
    assert len(accuracies) == 2
    assert float(accuracies[1]) > 60  # 88 steps; a guess is 10.


@pytest.fixture
def ptb(tmp_path):
    """Files in the place of the Penn Treebank."""
    directory = tmp_path / "jestimator" / "models" / "lstm" / "ptb"
    directory.mkdir(parents=True)
    words = ["<s>", "</s>", *(f"w{i}" for i in range(20))]
    (directory / "vocab.txt").write_text("".join(f"{word} 1\n" for word in words))
    lines = np.random.default_rng(0).integers(2, 22, (400, 40))
    text = "".join(" ".join(words[i] for i in line) + "\n" for line in lines)
    (directory / "ptb.train.txt").write_text(text)
    (directory / "ptb.valid.txt").write_text(text[:5000])


@pytest.mark.parametrize("model", MODELS)
def test_the_commands_train_and_evaluate(model, ptb, tmp_path, monkeypatch, capsys):
    """All flags are those of the README; few steps, a small LSTM, and the CNN with Amos."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    steps = ["--max_train_steps=4", "--check_every_steps=2", "--noprogress"]
    if model.endswith("lm"):
        sizes = ("hidden_size", "memory_size")
        steps += [f"--module_config.model_config.{name}=8" for name in sizes]
    else:
        steps += ["--module_config.optimizer=amos"]
    commands = [text for text in blocks() if f'module_imp="{model}"' in text]
    assert len(commands) == 2
    for text in commands:
        words = shlex.split(text.replace("\\\n", " ").replace("$HOME", str(tmp_path)))[3:]
        words = [word for word in words if not word.startswith("--module_config=")]
        words = [word.replace(f"imp={model}", f"imp={MODELS[model]}") for word in words]
        words = [word.replace("tfds://mnist/", "digits://") for word in words]
        assert main.main([*words, *(steps if "--train_pattern" in text else steps[2:])]) == 0
    run = pathlib.Path(next(w for w in words if "model_dir" in w).partition("=")[2])
    assert paths.list_steps(run)[-1] == 4
    shown = capsys.readouterr().out
    if model.endswith("lm"):
        (cost,) = re.findall(r"cost at step 4: (\S+)", shown)
        assert float(cost) < 2 * np.log(22)
    else:
        assert (run / "eval" / "high_test_accuracy").is_dir()
        assert len(re.findall(r"test_accuracy at step (\d)", shown)) == 3
