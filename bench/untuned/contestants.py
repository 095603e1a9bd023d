"""The optimizers that are compared: one setting for all tasks, and AdamW over a grid."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

import tekoa
from tekoa import optim

from . import models, tasks, training

RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
WIDER = (1e-5, 3e-5, 1e-4, *RATES, 1e-1, 3e-1, 1.0)  # Used while the best is at the edge.
DECAYS = (0.0, 0.1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contestant:
    """An optimizer by name. `prepare(trainer)` returns a function of `numbers`."""

    name: str
    prepare: Callable[[training.Trainer], training.MakeOptimizer]
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    eval_params: Callable[..., Any] | None = None
    ours: bool = False  # Whether it is one of Tekoa's, whose results change with its code.

    @property
    def version(self) -> str:
        return behaviour_of(self.prepare) if self.ours else f"optax {optax.__version__}"


@functools.cache
def behaviour_of(prepare: Callable[[training.Trainer], training.MakeOptimizer]) -> str:
    """Returns losses of an optimizer on two tiny tasks, which say whether its steps changed.

    The first has a table and biases, the second residual branches and six kernels in a row.
    """

    def load():
        rng = np.random.default_rng(0)
        rows = rng.integers(0, 20, (80, 3)), rng.integers(0, 4, 80)
        return tuple(a[:64] for a in rows), tuple(a[64:] for a in rows)

    def loss_of(model, loss):
        task = tasks.Task(
            name="tiny",
            about="",
            model=model,
            load=load,
            loss=loss,
            accuracy=None,
            batch_size=8,
            n_steps=12,
        )
        trainer = training.Trainer(task)
        return trainer.run(prepare(trainer), 0, {"factor": 1.0} if prepare is auto else {}).loss

    bag = models.Bag(vocab=20, width=4, n_classes=4)
    transformer = models.Transformer(vocab=20, width=8, n_layers=1, n_heads=2)
    losses = (
        loss_of(bag, models.softmax_loss),
        loss_of(transformer, lambda logits, labels: models.softmax_loss(logits[:, -1], labels)),
    )
    return "tiny " + " ".join(f"{loss:.4g}" for loss in losses)


def with_rate(scale: optax.GradientTransformation, schedule: optax.Schedule, rate: Any):
    """Chains a direction with a rate that may be traced."""
    return optax.chain(scale, optax.scale_by_schedule(lambda step: -rate * schedule(step)))


def warmup_cosine(n_steps: int, peak: float = 1.0, warmup: float = 0.05) -> optax.Schedule:
    """Returns a schedule that rises to `peak` and falls to 0."""
    return optax.warmup_cosine_decay_schedule(0.0, peak, round(warmup * n_steps), n_steps)


def adamw(trainer: training.Trainer) -> training.MakeOptimizer:
    schedule = warmup_cosine(trainer.task.n_steps)

    def make(rate, decay):
        parts = optax.scale_by_adam(), optax.add_decayed_weights(decay)
        return with_rate(optax.chain(*parts), schedule, rate)

    return make


def nadamw(trainer: training.Trainer) -> training.MakeOptimizer:
    rate = warmup_cosine(trainer.task.n_steps, 0.001908, warmup=0.1)
    return lambda: optax.nadamw(rate, b1=0.909, b2=0.9989, weight_decay=0.0812)


def schedule_free(trainer: training.Trainer) -> training.MakeOptimizer:
    warmup_steps = round(0.02 * trainer.task.n_steps)
    return lambda: contrib.schedule_free_adamw(
        0.0025, warmup_steps=warmup_steps, b1=0.9, b2=0.9955, weight_decay=0.0812
    )


def muon(trainer: training.Trainer) -> training.MakeOptimizer:
    n_steps = trainer.task.n_steps
    rates = [warmup_cosine(n_steps, peak) for peak in (28.6 * 0.0001357, 0.0001357)]
    return lambda: contrib.muon(rates[0], beta=0.956, adam_learning_rate=rates[1])


def ademamix(trainer: training.Trainer) -> training.MakeOptimizer:
    rate = warmup_cosine(trainer.task.n_steps, 0.002)
    return lambda: contrib.ademamix(rate, b1=0.8, b2=0.995, b3=0.9995, alpha=8, weight_decay=0.1)


def prodigy(trainer: training.Trainer) -> training.MakeOptimizer:
    return lambda: contrib.prodigy(optax.cosine_decay_schedule(1.0, trainer.task.n_steps))


def dadapt_adamw(trainer: training.Trainer) -> training.MakeOptimizer:
    return lambda: contrib.dadapt_adamw(optax.cosine_decay_schedule(1.0, trainer.task.n_steps))


def amos(trainer: training.Trainer) -> training.MakeOptimizer:
    """Published Amos with the scales that are read off the model."""
    n_batches = trainer.n_examples / trainer.task.batch_size
    schedule = warmup_cosine(trainer.task.n_steps)
    tx = optim.amos_for(
        trainer.loss_fn(),
        trainer.init(0)[0],
        trainer.batch(),
        n_batches=n_batches,
        learning_rate=lambda step: n_batches**-0.5 * schedule(step),
        momentum=0.9,
    )
    return lambda: tx


def later_amos(trainer: training.Trainer) -> training.MakeOptimizer:
    """The later form of Amos, whose rate follows from the number of steps."""
    table = scales_of(trainer)
    tx = optim.amos_for_budget(trainer.task.n_steps, table.eta_fn, table.shape_fn)
    return lambda: tx


def muon_by_roles(trainer: training.Trainer) -> training.MakeOptimizer:
    """Muon on the hidden matrices that the table of roles names, sphere on the rest."""
    tx = optim.muon_for(scales_of(trainer), n_steps=trainer.task.n_steps)
    return lambda: tx


def auto(trainer: training.Trainer) -> training.MakeOptimizer:
    """What `optimizer="auto"` is; `factor` multiplies its steps."""
    table = scales_of(trainer)
    size = optim.sphere.step_size(trainer.task.n_steps)
    return lambda factor: optim.sphere.sphere(
        table, learning_rate=lambda count: factor * size(count)
    )


def auto_with_average(trainer: training.Trainer) -> training.MakeOptimizer:
    """`auto` with a moving average of the parameters, which is evaluated in their place."""
    make = auto(trainer)
    return lambda: with_average(make(1.0))


def with_average(tx: optax.GradientTransformation, decay: float = 0.999):
    """Returns an optimizer whose state is the average of the parameters and its own state."""

    def update(updates, state, params, **extra_args):
        updates, inner = optax.with_extra_args_support(tx).update(
            updates, state[1], params, **extra_args
        )
        new_params = optax.apply_updates(params, updates)
        return updates, (optax.incremental_update(new_params, state[0], 1 - decay), inner)

    return optax.GradientTransformationExtraArgs(
        lambda params: (jax.tree.map(jnp.copy, params), tx.init(params)), update
    )


def scales_of(trainer: training.Trainer) -> Any:
    return tekoa.scales(trainer.loss_fn(), trainer.init(0)[0], *trainer.batch())


def auto_setting(factor: float) -> "Contestant":
    """Returns `auto` with other steps than its own."""
    name = "auto" if factor == 1 else f"auto x {factor:g}"
    return Contestant(name=name, prepare=auto, numbers={"factor": factor}, ours=True)


CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        auto_setting(1.0),
        Contestant(name="adamw 1e-3", prepare=adamw, numbers={"rate": 1e-3, "decay": 0.0}),
        Contestant(name="nadamw", prepare=nadamw),
        Contestant(
            name="schedule-free",
            prepare=schedule_free,
            eval_params=contrib.schedule_free_eval_params,
        ),
        Contestant(name="muon", prepare=muon),
        Contestant(name="ademamix", prepare=ademamix),
        Contestant(name="prodigy", prepare=prodigy),
        Contestant(name="d-adaptation", prepare=dadapt_adamw),
        Contestant(name="amos", prepare=amos, ours=True),
        Contestant(name="amos, later form", prepare=later_amos, ours=True),
        Contestant(name="muon by roles", prepare=muon_by_roles, ours=True),
    )
}


# Not for all tasks: averages only pay in longer runs.
WITH_AVERAGE = Contestant(
    name="auto, EMA 0.999",
    prepare=auto_with_average,
    eval_params=lambda state, params: state[0],
    ours=True,
)


def adamw_setting(rate: float, decay: float) -> Contestant:
    """Returns one point of AdamW's grid."""
    numbers = {"rate": rate, "decay": decay}
    return Contestant(name=f"adamw {rate:g} {decay:g}", prepare=adamw, numbers=numbers)
