"""What has changed since the last start of a run."""

import optax
import pytest
from flax import nnx
from tests.fitting.test_run import X, Y

import tekoa
from tekoa.fitting import settings


def fit(directory, **options):
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    options = {"loss": "cross_entropy", "optimizer": optax.sgd(0.5), **options}
    return tekoa.fit(model, (X, Y), directory=directory, **options)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"optimizer": optax.sgd(0.25)}, "optimizer.learning_rate: 0.5 -> 0.25"),
        ({"optimizer": "sgd"}, "optimizer.learning_rate: 0.5 -> 0.1"),
        ({"clip_norm": 2.0}, "clip_norm: not set -> 2.0"),
        ({"steps": 4, "optimizer": optax.sgd(0.25)}, None),
        ({}, None),
    ],
    ids=["rate", "name", "clipping", "nothing to do", "nothing"],
)
def test_a_resumed_run_says_what_has_changed(options, line, tmp_path, capsys):
    fit(tmp_path, steps=4, steps_per_check=2)
    assert "Changed" not in capsys.readouterr().out
    fit(tmp_path, **{"steps": 8, "steps_per_check": 2, **options})
    printed = capsys.readouterr().out
    if line is None:
        assert "Changed" not in printed
    else:
        assert f"Changed at step 4, since the last start:\n  {line}\n" in printed


def test_numbers_of_an_optimizer_are_found_in_schedules_and_chains():
    schedule = optax.linear_schedule(1.0, 0.0, 100)
    tx = optax.chain(optax.clip(2.0), optax.adam(schedule, b1=0.8), optax.scale(0.5))
    numbers = settings.settings_of(tx)["optimizer"]
    assert numbers["max_delta"] == 2.0
    assert numbers["b1"] == 0.8
    assert numbers["init_value"] == 1.0
    assert numbers["learning_rate"] == 0.5
