import shutil
import threading

import pytest

from tekoa import store
from tekoa.extensions.best_files import (
    BestFileReader,
    BestFileWriter,
    HighestCheckpointFileReader,
    HighestCheckpointFileWriter,
    LowestCheckpointFileReader,
    LowestCheckpointFileWriter,
)
from tekoa.extensions.checkpoint_files import CheckpointFileReader, CheckpointFileWriter
from tekoa.store.commit import fault_points
from tekoa.store.commit.score import BestScore

NAN, INF = float("nan"), float("inf")
PAIRS = {
    "lowest": (LowestCheckpointFileWriter, LowestCheckpointFileReader),
    "highest": (HighestCheckpointFileWriter, HighestCheckpointFileReader),
}


def write(make, directory, summary, values, first=1):
    writer = make(directory, "loss")
    for step, value in enumerate(values, start=first):
        checkpoint = summary(step, eval={"loss": value})
        assert writer(checkpoint) is checkpoint
    writer.close()
    return writer.best


def read(make, directory, summary):
    restored = make(directory, "model", "loss").restore(summary(0).state)
    return None if restored is None else int(restored.state.step)


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
def test_the_reader_finds_the_best_checkpoint(tmp_path, summary, which, values, best, step):
    writer, reader = PAIRS[which]
    assert write(writer, tmp_path, summary, values) == best
    assert read(reader, tmp_path, summary) == step


def test_a_best_of_zero_is_remembered_by_the_next_run(tmp_path, summary):
    write(LowestCheckpointFileWriter, tmp_path, summary, [0.0])
    assert write(LowestCheckpointFileWriter, tmp_path, summary, [0.5, 0.1], first=2) == 0.0
    assert read(LowestCheckpointFileReader, tmp_path, summary) == 1
    assert write(LowestCheckpointFileWriter, tmp_path, summary, [-0.5], first=4) == -0.5
    assert read(LowestCheckpointFileReader, tmp_path, summary) == 4


def test_nan_and_inf_are_never_best(tmp_path, summary):
    assert write(LowestCheckpointFileWriter, tmp_path, summary, [NAN, INF]) is None
    assert read(LowestCheckpointFileReader, tmp_path, summary) is None


def test_best_and_regular_writers_can_share_a_directory(tmp_path, summary):
    writers = [
        CheckpointFileWriter(tmp_path),
        LowestCheckpointFileWriter(tmp_path, "loss"),
        HighestCheckpointFileWriter(tmp_path, "loss"),
        LowestCheckpointFileWriter(tmp_path, "loss", group="train"),
    ]
    for step, value in enumerate([2.0, 1.0, 3.0, 2.5], start=1):
        checkpoint = summary(step, eval={"loss": value}, train={"loss": -value})
        for writer in writers:
            writer(checkpoint)
    for writer in writers:
        writer.close()
    assert read(LowestCheckpointFileReader, tmp_path, summary) == 2
    assert read(HighestCheckpointFileReader, tmp_path, summary) == 3
    newest = CheckpointFileReader(tmp_path, "model").restore(summary(0).state)
    assert int(newest.state.step) == 4
    in_train = LowestCheckpointFileReader(tmp_path, "model", "loss", group="train")
    assert int(in_train.restore(summary(0).state).state.step) == 3


def test_a_better_value_at_an_existing_step_is_harmless(tmp_path, summary):
    write(LowestCheckpointFileWriter, tmp_path, summary, [2.0])
    assert write(LowestCheckpointFileWriter, tmp_path, summary, [1.0, 0.5]) == 0.5
    assert read(LowestCheckpointFileReader, tmp_path, summary) == 2


def test_a_better_value_of_another_history_replaces_the_model_too(tmp_path, summary):
    write(LowestCheckpointFileWriter, tmp_path, summary, [0.5])
    write(LowestCheckpointFileWriter, tmp_path, summary, [0.4])
    (stored,) = store.inspect(tmp_path / "low_eval_loss")
    assert (stored.step, stored.metrics["eval/loss"]) == (1, 0.4)


def test_a_kill_between_commit_and_score_is_harmless(tmp_path, summary):
    write(LowestCheckpointFileWriter, tmp_path, summary, [2.0])
    (tmp_path / "low_eval_loss" / "score").unlink()
    assert write(LowestCheckpointFileWriter, tmp_path, summary, [2.0]) == 2.0


def test_the_score_is_written_after_its_checkpoint(tmp_path, summary, monkeypatch):
    is_written = threading.Event()
    record = BestScore.record
    monkeypatch.setattr(
        BestScore, "record", lambda self, value: (record(self, value), is_written.set())
    )
    early = []

    def reach(point):
        if point == "before_rename":
            early.append(is_written.wait(0.2))

    monkeypatch.setattr(fault_points, "reach", reach)
    assert write(LowestCheckpointFileWriter, tmp_path, summary, [0.5]) == 0.5
    assert early == [False]


def test_a_missing_metric_is_an_error(tmp_path, summary):
    writer = LowestCheckpointFileWriter(tmp_path, "loss")
    with pytest.raises(LookupError, match=r"no metric 'eval/loss'; it has \['train/loss'\].*Eval"):
        writer(summary(1, train={"loss": 1.0}))
    writer.close()


def test_the_mode_must_be_min_or_max(tmp_path):
    with pytest.raises(ValueError, match="mode must be"):
        BestFileWriter(tmp_path, "loss", mode="best")


@pytest.mark.parametrize(("mode", "step"), [("min", 2), ("max", 1)])
def test_the_mode_selects_the_checkpoint(tmp_path, summary, mode, step):
    writer = BestFileWriter(tmp_path, "loss", mode=mode)
    for i, value in enumerate([2.0, 1.0], start=1):
        writer(summary(i, eval={"loss": value}))
    writer.close()
    reader = BestFileReader(tmp_path, "loss", mode=mode, target="model")
    assert reader.target == "model"
    assert int(reader.restore(summary(0).state).state.step) == step


@pytest.mark.parametrize("which", PAIRS)
def test_the_calls_of_the_original_guide_work(tmp_path, summary, which):
    make_writer, make_reader = PAIRS[which]
    writer = make_writer(output_dir=tmp_path, metric="lnpp")
    assert isinstance(writer, BestFileWriter)
    writer(summary(3, eval={"lnpp": 1.0}))
    writer.close()
    reader = make_reader(dir=tmp_path, target="model", metric="lnpp")
    assert isinstance(reader, BestFileReader)
    assert int(reader.restore(summary(0).state).state.step) == 3
    assert make_reader(input_dir=tmp_path, target=None, metric="lnpp").target is None
    with pytest.raises(TypeError, match="two names of the same argument"):
        make_reader(tmp_path, dir=tmp_path, target="model", metric="lnpp")


@pytest.mark.parametrize("which", PAIRS)
def test_a_better_value_at_a_lower_step_is_what_the_reader_finds(tmp_path, summary, which):
    writer, reader = PAIRS[which]
    sign = 1 if which == "lowest" else -1
    write(writer, tmp_path, summary, [sign * 2.0, sign * 1.0], first=20)
    assert write(writer, tmp_path, summary, [sign * 3.0, sign * 0.5], first=10) == sign * 0.5
    assert read(reader, tmp_path, summary) == 11


def test_the_score_is_that_of_the_stored_model(tmp_path, summary):
    """Whatever the file says: a program may be killed before it is written."""
    write(LowestCheckpointFileWriter, tmp_path, summary, [0.5])
    score = tmp_path / "low_eval_loss" / "score"
    score.write_text("0.75")
    writer = LowestCheckpointFileWriter(tmp_path, "loss")
    assert (writer.best, score.read_text()) == (0.5, "0.5")
    writer.close()


def test_a_score_without_a_model_does_not_count(tmp_path, summary):
    write(LowestCheckpointFileWriter, tmp_path, summary, [0.5])
    shutil.rmtree(tmp_path / "low_eval_loss" / "checkpoint_1")
    assert write(LowestCheckpointFileWriter, tmp_path, summary, [0.75], first=2) == 0.75
    assert read(LowestCheckpointFileReader, tmp_path, summary) == 2


def test_several_of_the_best_can_be_kept(tmp_path, summary):
    writer = LowestCheckpointFileWriter(tmp_path, "loss", keep=2)
    for step, value in enumerate([4.0, 3.0, 5.0, 2.0]):
        writer(summary(step, eval={"loss": value}))
    writer.close()
    assert [info.step for info in store.inspect(tmp_path / "low_eval_loss")] == [1, 3]


def test_with_several_kept_a_better_value_at_a_lower_step_is_still_the_newest(tmp_path, summary):
    writer = LowestCheckpointFileWriter(tmp_path, "loss", keep=2)
    for step, value in ((20, 2.0), (30, 1.0), (25, 0.5)):
        writer(summary(step, eval={"loss": value}))
    writer.close()
    # Step 30 is the second best, but readers would take it for the best.
    assert read(LowestCheckpointFileReader, tmp_path, summary) == 25


def test_the_best_value_of_an_earlier_run_is_printed(tmp_path, summary, capsys):
    write(LowestCheckpointFileWriter, tmp_path, summary, [0.5, 0.25])
    assert not capsys.readouterr().out
    LowestCheckpointFileWriter(tmp_path, "loss").close()
    expected = "The lowest value of the metric eval/loss is set to 0.25000000.\n"
    assert capsys.readouterr().out == expected
    LowestCheckpointFileWriter(tmp_path, "loss", stdout=False).close()
    assert not capsys.readouterr().out


def test_best_writers_are_classes_with_a_common_base(tmp_path):
    class Own(LowestCheckpointFileWriter):
        pass

    writer = Own(output_dir=tmp_path, metric="loss")
    assert isinstance(writer, BestFileWriter)
    writer.close()
