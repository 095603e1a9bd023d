"""A2, A20, A21: a killed and resumed run has the bits of an undisturbed one."""

import pathlib
import shutil
import signal

import numpy as np
import optax
import pytest

from tekoa import CheckpointFileReader, CheckpointFileWriter, TrainLoop, TrainTask, data
from tekoa.store.commit import paths
from tekoa.testing.kills import check_kills

PROGRAMS = pathlib.Path(__file__).parent / "programs"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_runs_killed_and_stopped_give_the_same_bits(kind, figure, tmp_path):
    kinds = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
    report = check_kills(
        f"{PROGRAMS / 'loops.py'}:{kind}_loop", n_kills=3, kinds=kinds, directory=tmp_path, seed=1
    )
    assert (report.n_killed, report.n_stopped) == (1, 2)
    figure(kills=1, stops=2, differing_leaves=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixed", "scheduled"])
def test_kills_with_mixed_and_packed_data(kind, tmp_path):
    loop = f"{PROGRAMS / 'loops.py'}:{kind}_loop"
    report = check_kills(loop, n_kills=2, kinds=[signal.SIGKILL], directory=tmp_path, seed=4)
    assert report.n_killed == 2


@pytest.mark.slow
def test_kills_with_frequent_saves(figure, tmp_path):
    report = check_kills(
        f"{PROGRAMS / 'loops.py'}:frequent_loop",
        n_kills=6,
        kinds=[signal.SIGKILL],
        directory=tmp_path,
        seed=2,
    )
    assert report.n_killed == 6
    figure(kills=6, differing_leaves=0)
    left = {path.name.split("_")[0] for path in (tmp_path / "killed").iterdir()}
    assert left == {"checkpoint", "notes", "run.json", "source"}


class Recorded:
    """Batches that record which examples they contained."""

    def __init__(self, batches):
        self._batches, self.examples = batches, []

    def __iter__(self):
        return self

    def __next__(self):
        batch = next(self._batches)
        self.examples.append(batch["i"].tolist())
        return batch

    def state(self):
        return self._batches.state()

    def restore(self, state):
        self._batches.restore(state)
        self.examples.clear()


def line_loop(batches, directory=None, **options):
    model = {"w": np.zeros(3, np.float32)}
    task = TrainTask(
        apply=lambda params, x: x @ params["w"],
        optimizer=optax.sgd(0.1),
        loss=lambda out, y: ((out - y) ** 2).mean(),
        data=batches,
        split=lambda batch: ((batch["x"],), (batch["y"],)),
    )
    init = model if directory is None else CheckpointFileReader(directory, model)
    return TrainLoop(init, task, n_steps_per_checkpoint=1, grads=False, **options)


def shuffled(seed=5, batch_size=6, n_examples=20):
    x = np.random.default_rng(0).normal(size=(n_examples, 3)).astype(np.float32)
    source = data.as_source({"x": x, "y": x.sum(1), "i": np.arange(n_examples)})
    return source.batches(batch_size, seed=seed, shuffle=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of three epochs that keeps every step, and the examples it used."""
    directory = tmp_path_factory.mktemp("position")
    batches = Recorded(shuffled())
    writer = CheckpointFileWriter(directory, keep=100)
    for checkpoint in line_loop(batches, n_steps=10):
        writer(checkpoint)
    writer.close()
    return directory, batches.examples


@pytest.mark.slow
def test_data_resumes_at_its_position(saved, figure, tmp_path):
    directory, expected = saved
    # 20 examples in batches of 6: steps 3 and 7 cross the end of an epoch, step 10 ends on it.
    differing = 0
    for step in range(1, 10):
        own = tmp_path / str(step)
        shutil.copytree(paths.step_dir(directory, step), paths.step_dir(own, step))
        batches = Recorded(shuffled())
        list(line_loop(batches, own, n_steps=10))
        differing += batches.examples != expected[step:]
    rows = np.concatenate(expected)
    counts = [np.bincount(rows[i : i + 20], minlength=20).tolist() for i in (0, 20, 40)]
    assert counts == [[1] * 20] * 3
    figure(resumed_at_steps=9, differing_batches=differing)
    assert differing == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seed": 6}, "seed was 5, is 6"),
        ({"batch_size": 5}, "batch_size was 6, is 5"),
        ({"n_examples": 21}, "source was .*20.*, is .*21"),
    ],
)
def test_changed_data_is_refused_with_the_reason(saved, changes, reason):
    with pytest.raises(data.DataError, match=reason):
        line_loop(shuffled(**changes), saved[0], n_steps=10)
