import itertools
import pathlib

import numpy as np
import pytest

from tekoa.core import trees
from tekoa.estimator.cli.flags import UsageError, parse
from tekoa.estimator.model_file.program import program_of
from tekoa.estimator.modes import assemble
from tekoa.estimator.run import run as runs

TINY = str(pathlib.Path(__file__).parents[1] / "tiny_model.py")


def loop_of(*flags):
    _, config = parse([f"--module_imp={TINY}", "--model_dir=unused", *flags])
    run = runs.open_run(config)
    return assemble.training_loop(
        run, program_of(run, "train"), 0, make_reader=lambda parts, _: parts.model, stdout=False
    )


def test_the_loop_follows_the_flags():
    parts, loop = loop_of("--max_train_steps=4", "--check_every_steps=6", "--save_every_steps=4")
    assert (loop.n_steps, loop.n_steps_per_checkpoint) == (4, 2)
    assert [checkpoint.step for checkpoint in loop] == [2, 4]
    assert parts.layout is None


def test_training_ends_with_the_data():
    _, loop = loop_of("--train_epochs=1", "--max_train_steps=1000")
    assert loop.n_steps == 20  # 200 rows in batches of 10.


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--accumulate=3", "must divide"),
        ("--steps_per_dispatch=0", "an integer of at least 1"),
        ("--steps_per_dispatch=²", "an integer of at least 1"),
        ("--batch_schedule=5:15 --accumulate=2", "--batch_schedule sets 15"),
        ("--batch_schedule=0:20,5:40", "set --train_batch_size=20, which is 10"),
        ("--batch_schedule=5:0", "at least 1"),
        ("--batch_schedule=later", "pairs of step and number .* got 'later'"),
        ("--batch_schedule=5:20 --train_consecutive=2", "continue one another"),
        ("--unfreeze_at=nowhere=5", "--unfreeze_at: .*nowhere"),
        ("--unfreeze_at=kernel=0", "STEPS a number of steps from 1 up; got 'kernel=0'"),
        ("--freeze_at=kernel", "--freeze_at must be .* got 'kernel'"),
        ("--freeze_at=nowhere=5", "--freeze_at: .*nowhere"),
        ("--freeze_at=kernel=2 --unfreeze_at=kernel=3", "--freeze_at: .* would never train"),
        ("--unfreeze_at=[=3", "got '\\[=3'"),
        ("--length_schedule=5:2", "--length_schedule needs a number for step 0"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flag, message):
    with pytest.raises(UsageError, match=message):
        loop_of(*flag.split())


def test_the_rows_of_batches_follow_the_schedule():
    _, loop = loop_of(
        "--batch_schedule=5:30,8:50",
        "--train_epochs=1",
        "--check_every_steps=4",
        "--max_train_steps=1000",
    )
    assert loop.n_steps == 9  # 5 x 10, 3 x 30 and 50 rows; the last 10 are dropped.
    assert [c.setup["n_rows"] for c in loop] == [10, 30, 50]


def test_parameters_train_between_the_steps_of_the_flags():
    _, loop = loop_of("--unfreeze_at=kernel=2", "--freeze_at=kernel=3", "--max_train_steps=4")
    names = trees.named_leaves(loop.state.params)
    (kernel,) = [name for name in names if "kernel" in name[-1]]
    before = [trees.named_leaves(loop.state.params)]
    for _ in range(4):
        loop.next_step()
        before.append(trees.named_leaves(loop.state.params))
    changed = [
        {name for name in names if np.any(np.asarray(a[name]) != np.asarray(b[name]))}
        for a, b in itertools.pairwise(before)
    ]
    assert [kernel in names for names in changed] == [False, False, True, False]
    assert all(len(names) > 0 for names in changed)
