"""The LSTM's memory outlives a kill in the middle of a group of consecutive batches."""

import signal

import numpy as np
import pytest

from support.processes import python
from tekoa import load_checkpoint
from tekoa.store.commit import paths
from tekoa.testing import assert_trees_equal

GROUP, EVERY, N_STEPS = 8, 3, 15
FLAGS = [
    "--module_config.seq_length=8",
    "--module_config.model_config.hidden_size=6",
    "--module_config.model_config.memory_size=10",
    "--train_pattern=sample://split=valid",
    "--train_batch_size=4",
    "--train_shuffle_buf=100",
    f"--train_consecutive={GROUP}",
    f"--max_train_steps={N_STEPS}",
    f"--check_every_steps={EVERY}",
    "--random_seed=2",
    "--steps_per_dispatch=1",
    "--noprogress",
]


def train(directory, **environment):
    words = ("-m", "tekoa", "train", "lstm_lm", f"--model_dir={directory}", *FLAGS)
    return python(*words, env=environment, timeout=300).returncode


@pytest.mark.slow
def test_a_kill_between_two_consecutive_batches_changes_no_bit(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(whole) == 0
    # Killed when the steps 0, 3, 6 and 9 are on disk: 9 is the second of its group.
    assert train(parts, TEKOA_FAULT_AT="after_rename:4:SIGKILL") == -signal.SIGKILL
    killed_at = paths.list_steps(parts)[-1]
    assert killed_at % GROUP != 0
    carry = load_checkpoint(parts)["carry"]
    assert np.abs(carry["memory"]).max() > 0

    assert train(parts) == 0
    ours, theirs = load_checkpoint(parts), load_checkpoint(whole)
    assert int(ours["step"]) == N_STEPS
    for item in ("model_params", "optimizer_state", "carry"):
        assert_trees_equal(ours[item], theirs[item])
