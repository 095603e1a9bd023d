import optax
import pytest

import tekoa
from tekoa.core.rules import NoRuleError
from tekoa.recipes import rates

TABLE = {"out/bias$": "freeze", "kernel$": optax.linear_schedule(0.1, 0.0, 10), "bias$": 0.01}


def test_rates_of_groups_are_in_metrics_logs_and_tensorboard(model, toy, tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    lines = []
    writer = tekoa.SummaryWriter(tmp_path)
    process = tekoa.serial(tekoa.SummaryLogger(lines.append), writer)
    loop = toy.loop(model, tekoa.groups(TABLE, make=optax.sgd))
    seen = [process(checkpoint).metrics["rates"] for checkpoint in loop]
    writer.close()
    # The rate of the last of 3 and of 6 updates: counts start at 0.
    expected = {"out/bias$": [0.0, 0.0], "kernel$": [0.08, 0.05], "bias$": [0.01, 0.01]}
    for group, values in expected.items():
        assert [rates[group] for rates in seen] == pytest.approx(values, rel=1e-5)
    assert any(line.startswith("Step 6: rates") and "kernel$" in line for line in lines)
    events = accumulators.EventAccumulator(str(tmp_path)).Reload()
    points = [event.value for event in events.Scalars("rates/kernel$")]
    assert points == pytest.approx([0.08, 0.05], rel=1e-5)


def test_an_optimizer_without_groups_tells_its_rate_too(model, toy):
    loop = toy.loop(model, tekoa.rated(optax.adam, 0.02))
    assert loop.next_checkpoint().metrics["rates"] == {"all": pytest.approx(0.02)}


def test_a_leaf_in_no_group_is_named(model, toy):
    with pytest.raises(NoRuleError, match="'hidden/bias', 'out/bias'"):
        toy.loop(model, tekoa.groups({"kernel$": 0.1}, make=optax.sgd))


@pytest.mark.slow
def test_recipe_tells_the_rates(capsys):
    lines = rates.run(n_steps=50).lines
    assert set(lines) == {"out/bias$", "kernel$", "bias$"}
    # A warm-up of 10 steps to 0.01; the tenth update has count 9.
    assert lines["kernel$"][0] == pytest.approx(9e-3, rel=1e-5)
    assert "the frozen bias is still zero" in capsys.readouterr().out
