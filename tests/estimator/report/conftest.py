import json
import math

import pytest

from tekoa.extensions.tensorboard import EventFile, Point


@pytest.fixture
def write_run():
    """Returns a function that writes the files of a run: a record and curves."""

    def write(directory, *, seed=0, rate=0.1, n_checks=5, is_finished=True):
        (directory / "train").mkdir(parents=True)
        record = {"model": "m", "random_seed": seed, "settings": {"rate": rate}, "flags": {}}
        (directory / "run.json").write_text(json.dumps(record))
        if is_finished:
            (directory / "train_end.json").write_text(json.dumps({"step": 10 * n_checks}))
        add_points(directory, range(1, n_checks + 1), rate)
        return directory

    return write


def add_points(directory, checks, rate):
    """Writes another file of points, as a restart does."""
    events = EventFile(directory / "train")
    for check in checks:
        loss = math.exp(-rate * check)
        values = {
            "train/loss": loss,
            "train/valid_loss": 1.1 * loss,
            "train/valid_accuracy": 1 - loss,
            "train/seconds_per_step": 0.01,
            "params/w (2,)": 1.0,
        }
        events.write([Point(tag, x, 10 * check, 1e9 + check) for tag, x in values.items()])
    events.close()
