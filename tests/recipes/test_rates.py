import optax
import pytest

import tekoa
from tekoa.core.rules import NoRuleError
from tekoa.recipes import rates

TABLE = {"out/bias$": "freeze", "kernel$": optax.linear_schedule(0.1, 0.0, 10), "bias$": 0.01}


def test_rates_of_groups_are_in_metrics_logs_and_tensorboard(model, toy, tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    lines = []
    writer = tekoa.TensorBoardWriter(tmp_path)
    process = tekoa.serial(tekoa.ConsoleLogger(lines.append), writer)
    loop = toy.loop(model, tekoa.param_groups(TABLE, make=optax.sgd))
    history = [process(checkpoint).metrics["rates"] for checkpoint in loop]
    writer.close()
    # The rates of updates 3 and 6; schedules count from 0.
    expected = {"out/bias$": [0.0, 0.0], "kernel$": [0.08, 0.05], "bias$": [0.01, 0.01]}
    for group, values in expected.items():
        assert [metrics[group] for metrics in history] == pytest.approx(values, rel=1e-5)
    assert any(line.startswith("Step 6: rates") and "kernel$" in line for line in lines)
    events = accumulators.EventAccumulator(str(tmp_path)).Reload()
    points = [event.value for event in events.Scalars("rates/kernel$")]
    assert points == pytest.approx([0.08, 0.05], rel=1e-5)


def test_an_optimizer_without_groups_reports_its_rate(model, toy):
    loop = toy.loop(model, tekoa.rated(optax.adam, 0.02))
    assert loop.next_checkpoint().metrics["rates"] == {"all": pytest.approx(0.02)}


def test_a_parameter_without_a_group_is_named(model, toy):
    with pytest.raises(NoRuleError, match="'hidden/bias', 'out/bias'"):
        toy.loop(model, tekoa.param_groups({"kernel$": 0.1}, make=optax.sgd))


@pytest.mark.slow
def test_the_recipe_reports_the_rates(capsys):
    lines = rates.run(n_steps=50).lines
    assert set(lines) == {"out/bias$", "kernel$", "bias$"}
    # A warm-up of 10 steps to 0.01; the tenth update has count 9.
    assert lines["kernel$"][0] == pytest.approx(9e-3, rel=1e-5)
    assert "the frozen bias is still zero" in capsys.readouterr().out
