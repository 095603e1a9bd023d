"""The metrics of training that every checkpoint carries, and so logs and TensorBoard show."""

import jax

from tekoa.core.nonfinite import OnNan
from tekoa.core.state import TrainState
from tekoa.loop.engine.runner import Segment
from tekoa.loop.task import Training
from tekoa.optim import rates as optim_rates


def read_metrics(
    segment: Segment, state: TrainState, training: Training
) -> tuple[dict[str, dict[str, float]], int]:
    """Waits for the device; returns the metrics of a segment and the number of bad steps.

    Metrics are in the group "train": means over the segment's steps, such as "loss", and values of
    its last step, such as "last_loss". Learning rates that the optimizer reports, by parameter
    group, are in "rates".
    """
    outputs = {name: getattr(segment.output, name) for name in training.reported}
    outputs = {name: value for name, value in outputs.items() if value is not None}
    rates = optim_rates.current_rates(state.opt_state)
    outputs, rates, sums, n_bad = jax.device_get((outputs, rates, state.sums, state.health.n_bad))
    means = training.compute(sums)
    train = {
        "last_loss" if name == "loss" and name in means else name: float(value)
        for name, value in outputs.items()
    }
    # The loss first, and then that of the last step.
    metrics = {"train": {**({"loss": means["loss"]} if "loss" in means else {}), **train, **means}}
    if rates:
        metrics["rates"] = {group: float(rate) for group, rate in rates.items()}
    return metrics, int(n_bad)


def add_counts(
    metrics: dict[str, dict[str, float]],
    n_bad: int,
    on_nan: OnNan,
    segment: Segment,
    seconds: float,
) -> None:
    """Adds the number of bad steps, if there were any, and the time of a step."""
    if n_bad:
        name = "bad_steps" if on_nan == "count" else "skipped_steps"
        metrics["train"][name] = float(n_bad)
    seconds_per_step = max(0.0, seconds - segment.compile_seconds) / segment.n_steps
    metrics["train"]["seconds_per_step"] = seconds_per_step
