"""The metrics of training that every checkpoint carries, and so logs and TensorBoard show."""

from collections.abc import Mapping
from typing import Any

import jax

from tekoa.core import trees
from tekoa.core.nonfinite import OnNan
from tekoa.core.state import TrainState
from tekoa.core.trees import PyTree
from tekoa.loop.engine.programs import KeepGrads
from tekoa.loop.engine.runner import Segment
from tekoa.loop.task import Training
from tekoa.optim import named
from tekoa.optim import rates as optim_rates

# Values of the last step; all other metrics are means over the steps.
OF_LAST_STEP = (
    *("last_loss", "gradients_l2norm", "weights_l2norm", "loss_scale", "overflow_steps"),
    *("skipped_steps", "bad_steps"),
)
# They say how training runs, not how well the model does; lines of progress leave them out.
DIAGNOSTICS = (*OF_LAST_STEP, "seconds_per_step")


def read_metrics(
    segment: Segment, state: TrainState, training: Training, facts: Mapping[str, Any]
) -> tuple[dict[str, dict[str, float]], int]:
    """Waits for the device; returns the metrics of a segment and the number of bad steps.

    Metrics are in the group "train": means over the segment's steps, such as "loss", and values of
    its last step, such as "last_loss". In float16 they include the scale of the loss and the number
    of all steps so far that only lowered it. Learning rates that are known, by parameter group,
    are in "rates": those in the optimizer's state, and that of an optimizer with a name, from the
    loop's `facts`.
    """
    outputs = {name: getattr(segment.output, name) for name in training.reported}
    outputs = {name: value for name, value in outputs.items() if value is not None}
    rates = optim_rates.current_rates(state.opt_state)
    outputs, rates, sums, n_bad, scale = jax.device_get(
        (outputs, rates, state.sums, state.health.n_bad, state.loss_scale)
    )
    if not rates and (optimizer := facts.get("optimizer")):
        rate = named.rate_at(optimizer, int(state.step))
        rates = {} if rate is None else {"all": rate}
    means = training.compute(sums)
    train = {
        "last_loss" if name == "loss" and name in means else name: float(value)
        for name, value in outputs.items()
    }
    if scale is not None:
        train["loss_scale"] = float(scale.scale)
        train["overflow_steps"] = float(scale.n_overflows)
    # The loss first, and then that of the last step.
    metrics = {"train": {**({"loss": means["loss"]} if "loss" in means else {}), **train, **means}}
    if rates:
        metrics["rates"] = {group: float(rate) for group, rate in rates.items()}
    return metrics, int(n_bad)


def grads_or_norms(
    metrics: dict[str, dict[str, float]], segment: Segment, state: TrainState, keep: KeepGrads
) -> PyTree:
    """Returns the gradients of a segment's last step; adds norms to the metrics instead."""
    grads = segment.output.grads if segment.has_grads else None
    if keep != "norms" or grads is None:
        return grads
    names = ["/".join(name) for name in trees.leaf_names(state.params)]
    norms = jax.device_get(jax.tree.leaves(grads))
    for i, kind in enumerate(("gradient", "update", "param")):
        metrics[f"{kind}_norms"] = {n: float(x[i]) for n, x in zip(names, norms, strict=True)}
    return None


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
