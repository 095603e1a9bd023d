import pytest

from tekoa.extensions.best import (
    BestFileWriter,
    HighestCheckpointFileReader,
    HighestCheckpointFileWriter,
    LowestCheckpointFileReader,
    LowestCheckpointFileWriter,
)
from tekoa.extensions.files import CheckpointFileReader, CheckpointFileWriter

NAN, INF = float("nan"), float("inf")
PAIRS = {
    "lowest": (LowestCheckpointFileWriter, LowestCheckpointFileReader),
    "highest": (HighestCheckpointFileWriter, HighestCheckpointFileReader),
}


def write(make, directory, summary, values, first=1):
    writer = make(directory, "loss")
    for step, value in enumerate(values, start=first):
        given = summary(step, eval={"loss": value})
        assert writer(given) is given
    writer.close()
    return writer.best


def read(make, directory, summary):
    found = make(directory, "model", "loss").restore(summary(0).state)
    return None if found is None else int(found.state.step)


@pytest.mark.parametrize(
    ("which", "values", "best", "step"),
    [
        ("lowest", [0.5, 0.1, NAN, 0.9, -INF], 0.1, 2),
        ("lowest", [0.5, 0.0, 0.0], 0.0, 2),
        ("lowest", [NAN, 3.0], 3.0, 2),
        ("highest", [0.5, 0.9, NAN, 0.1, INF], 0.9, 2),
        ("highest", [-1.0, 0.0, -0.5], 0.0, 2),
    ],
)
def test_the_best_is_found_again(tmp_path, summary, which, values, best, step):
    writer, reader = PAIRS[which]
    assert write(writer, tmp_path, summary, values) == best
    assert read(reader, tmp_path, summary) == step


def test_a_best_of_zero_is_remembered_by_the_next_run(tmp_path, summary):
    write(LowestCheckpointFileWriter, tmp_path, summary, [0.0])
    assert write(LowestCheckpointFileWriter, tmp_path, summary, [0.5, 0.1], first=2) == 0.0
    assert read(LowestCheckpointFileReader, tmp_path, summary) == 1
    assert write(LowestCheckpointFileWriter, tmp_path, summary, [-0.5], first=4) == -0.5
    assert read(LowestCheckpointFileReader, tmp_path, summary) == 4


def test_nothing_finite_is_nothing_best(tmp_path, summary):
    assert write(LowestCheckpointFileWriter, tmp_path, summary, [NAN, INF]) is None
    assert read(LowestCheckpointFileReader, tmp_path, summary) is None


def test_best_and_regular_writers_share_a_directory(tmp_path, summary):
    writers = [
        CheckpointFileWriter(tmp_path),
        LowestCheckpointFileWriter(tmp_path, "loss"),
        HighestCheckpointFileWriter(tmp_path, "loss"),
        LowestCheckpointFileWriter(tmp_path, "loss", group="train"),
    ]
    for step, value in enumerate([2.0, 1.0, 3.0, 2.5], start=1):
        given = summary(step, eval={"loss": value}, train={"loss": -value})
        for writer in writers:
            writer(given)
    for writer in writers:
        writer.close()
    assert read(LowestCheckpointFileReader, tmp_path, summary) == 2
    assert read(HighestCheckpointFileReader, tmp_path, summary) == 3
    newest = CheckpointFileReader(tmp_path, "model").restore(summary(0).state)
    assert int(newest.state.step) == 4
    in_train = LowestCheckpointFileReader(tmp_path, "model", "loss", group="train")
    assert int(in_train.restore(summary(0).state).state.step) == 3


def test_a_better_value_at_a_step_that_is_there_already_does_no_harm(tmp_path, summary):
    write(LowestCheckpointFileWriter, tmp_path, summary, [2.0])
    assert write(LowestCheckpointFileWriter, tmp_path, summary, [1.0, 0.5]) == 0.5
    assert read(LowestCheckpointFileReader, tmp_path, summary) == 2


def test_a_kill_between_commit_and_score_does_no_harm(tmp_path, summary):
    write(LowestCheckpointFileWriter, tmp_path, summary, [2.0])
    (tmp_path / "low_eval_loss" / "score").unlink()
    assert write(LowestCheckpointFileWriter, tmp_path, summary, [2.0]) == 2.0


def test_a_metric_that_is_not_there_is_named(tmp_path, summary):
    writer = LowestCheckpointFileWriter(tmp_path, "loss")
    with pytest.raises(KeyError, match=r"'eval/loss'.*\['train/loss'\].*Put the EvalLoop before"):
        writer(summary(1, train={"loss": 1.0}))
    writer.close()


def test_a_mode_is_min_or_max(tmp_path):
    with pytest.raises(ValueError, match="mode must be"):
        BestFileWriter(tmp_path, "loss", mode="best")
