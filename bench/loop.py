"""Compares the steps per second of TrainLoop with hand-written loops and other libraries.

Run: python bench/loop.py [--only speed nnx host start memory] [--models mlp cnn transformer]
     [--rounds 15] [--peers]
`--peers` adds Keras and Lightning; they need a separate virtual environment:
     pip install torch==2.13.0 lightning keras && pip install -e .
All contestants of a model run alternately; ratios are medians over rounds.
"""

import argparse
import functools
import itertools
import logging
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import loop_models as models
import timing

import tekoa
from tekoa.core import step as steps

N_STEPS = {"mlp": 400, "cnn": 100, "transformer": 30}


def by_hand(name):
    """A jitted loop over NumPy batches, as a user would write it."""
    model, tx = models.MODELS[name](), optax.adam(1e-3)
    data = models.shuffled(*models.arrays(name))
    params = model.init(jax.random.key(0), next(data)[0])
    now = [params, tx.init(params)]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, x, y):
        value, grads = jax.value_and_grad(lambda p: models.loss(model.apply(p, x), y))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    def run():
        for x, y in itertools.islice(data, N_STEPS[name]):
            now[0], now[1], value = step(now[0], now[1], x, y)
        value.block_until_ready()

    return run


def indexing_devices(name):
    """The loop of the original README, which indexes batches from device arrays."""
    model, tx = models.MODELS[name](), optax.adam(1e-3)
    x, y = (jnp.array(a) for a in models.arrays(name))
    params = model.init(jax.random.key(0), x[: models.BATCH])
    now = [params, tx.init(params)]
    rng = np.random.default_rng(0)

    @jax.jit
    def step(params, opt_state, x, y):
        value, grads = jax.value_and_grad(lambda p: models.loss(model.apply(p, x), y))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    def run():
        order = rng.permutation(len(x))
        for i in range(N_STEPS[name]):
            start = i * models.BATCH % (len(x) - models.BATCH)
            rows = order[start : start + models.BATCH]
            now[0], now[1], value = step(now[0], now[1], x[rows], y[rows])
        value.block_until_ready()

    return run


def with_tekoa(name, directory, **options):
    """TrainLoop with a logger and TensorBoard every 100 steps."""
    task = tekoa.TrainTask(
        optimizer=optax.adam(1e-3),
        loss=models.loss,
        data=models.shuffled(*models.arrays(name)),
    )
    loop = tekoa.TrainLoop(models.MODELS[name](), task, n_steps_per_checkpoint=100, **options)
    process = tekoa.serial(
        tekoa.SummaryLogger(logging.getLogger("bench").debug), tekoa.SummaryWriter(directory)
    )

    def run():
        for checkpoint in loop(n_steps=loop.step + N_STEPS[name]):
            process(checkpoint)

    return run


def speed(name, n_rounds, with_peers):
    with tempfile.TemporaryDirectory() as directory:
        contestants = {
            "hand-written": by_hand(name),
            "tekoa": with_tekoa(name, f"{directory}/auto"),
            "tekoa, single steps": with_tekoa(name, f"{directory}/one", steps_per_dispatch=1),
        }
        if name == "mlp":
            contestants["indexing device arrays"] = indexing_devices(name)
        if with_peers:
            contestants["keras fit"] = models.keras_fit(name, N_STEPS[name])
            contestants["lightning"] = models.lightning_fit(name, N_STEPS[name])
        contestants = {k: v for k, v in contestants.items() if v is not None}
        seconds = timing.interleave(contestants, n_rounds=n_rounds, n_warm=4)
    print(f"{name}: {N_STEPS[name]} steps of {models.BATCH}, medians of {n_rounds} rounds")
    for contestant, values in seconds.items():
        each = 1e6 * statistics.median(values) / N_STEPS[name]
        faster = timing.ratio(seconds, contestant, "tekoa")
        print(f"  {contestant:24} {each:9.0f} us/step   tekoa is {faster:5.2f}x as fast")


def nnx_step(n_rounds, n_layers=20):
    """Compares the step of a deep, narrow NNX model with the same step under nnx.jit."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(n_layers)])

        def __call__(self, x):
            for layer in self.layers:
                x = x + jax.nn.relu(layer(x))
            return x

    x = np.ones((models.BATCH, 16), np.float32)

    def mse(out, y):
        return jnp.mean((out - y) ** 2)

    module = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(module, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def theirs(module, optimizer, x, y):
        value, grads = nnx.value_and_grad(lambda m: mse(m(x), y))(module)
        optimizer.update(module, grads)
        return value

    fns, tx = tekoa.as_model_fns(Net(nnx.Rngs(0))), optax.adam(1e-3)
    now = [steps.init_state(fns, tx, jax.random.key(0), inputs=(x,))]
    ours = jax.jit(steps.make_train_step(fns, mse, tx), donate_argnums=0)
    task = tekoa.TrainTask(optimizer=tx, loss=mse, data=itertools.repeat((x, x)))
    loop = tekoa.TrainLoop(Net(nnx.Rngs(0)), task, n_steps_per_checkpoint=100, steps_per_dispatch=1)

    def run_theirs():
        for _ in range(100):
            value = theirs(module, optimizer, x, x)
        value.block_until_ready()

    def run_ours():
        for _ in range(100):
            now[0], output = ours(now[0], (x, x))
        output.loss.block_until_ready()

    contestants = {"nnx.jit": run_theirs, "pure step": run_ours, "TrainLoop": loop.next_checkpoint}
    seconds = timing.interleave(contestants, n_rounds=n_rounds)
    print(f"nnx: {n_layers}-layer MLP of width 16")
    for contestant, values in seconds.items():
        of_theirs = timing.ratio(seconds, contestant, "nnx.jit")
        each = 1e6 * statistics.median(values) / 100
        print(f"  {contestant:24} {each:9.0f} us/step   {of_theirs:5.2f} of nnx.jit")


def host_cost(n_rounds):
    """Measures the overhead of the loop per step, with a step that does nothing."""
    x, y = next(models.shuffled(*models.arrays("mlp")))
    task = tekoa.TrainTask(
        optimizer=optax.adam(1e-3), loss=models.loss, data=itertools.repeat((x, y))
    )
    loop = tekoa.TrainLoop(models.Mlp(), task, n_steps_per_checkpoint=10, steps_per_dispatch=1)
    loop.next_checkpoint()
    runner = loop._runner
    outputs = runner._current[0][1]
    runner._rollback = None
    runner._last = runner._dispatcher.one = lambda leaves, batch: (leaves, outputs)
    contestants = {"loop": lambda: runner.advance(runner.step + 2000)}
    seconds = timing.interleave(contestants, n_rounds=n_rounds)["loop"]
    each = [1e6 * value / 2000 for value in seconds]
    print(f"host: {statistics.median(each):.1f} us per step (minimum {min(each):.1f})")


FIRST_STEP = {
    "hand-written": """
import functools, jax, numpy as np, optax
import loop_models as models
model, tx = models.Mlp(), optax.adam(1e-3)
x, y = next(models.shuffled(*models.arrays("mlp", 64)))
params = model.init(jax.random.key(0), x)
opt_state = tx.init(params)
@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(params, opt_state, x, y):
    value, grads = jax.value_and_grad(lambda p: models.loss(model.apply(p, x), y))(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value
step(params, opt_state, x, y)[2].block_until_ready()
""",
    "tekoa": """
import optax
import loop_models as models
from tekoa import TrainLoop, TrainTask
task = TrainTask(optimizer=optax.adam(1e-3), loss=models.loss,
                 data=models.shuffled(*models.arrays("mlp", 64)))
TrainLoop(models.Mlp(), task).next_step()
""",
}


def first_step(n_rounds):
    """Measures the time from process start to the first finished step."""

    def run(script):
        here = pathlib.Path(__file__).parent
        subprocess.run([sys.executable, "-c", script], cwd=here, check=True)

    contestants = {name: functools.partial(run, text) for name, text in FIRST_STEP.items()}
    seconds = timing.interleave(contestants, n_rounds=n_rounds, n_warm=1)
    print("start: process start to the first finished step")
    for name, values in seconds.items():
        ratio = timing.ratio(seconds, name, "hand-written")
        print(f"  {name:24} {statistics.median(values):9.2f} s   {ratio:5.2f} of hand-written")


def memory(n_steps=100_000):
    """Measures resident memory over many steps of a tiny model, a checkpoint every 100."""
    rng = np.random.default_rng(0)
    data = itertools.cycle([(rng.normal(size=(8, 3)).astype(np.float32), np.ones(8, np.float32))])
    task = tekoa.TrainTask(
        apply=lambda p, x: x @ p["w"],
        optimizer=optax.adam(1e-3),
        loss=lambda out, y: jnp.mean((out - y) ** 2),
        data=data,
    )
    loop = tekoa.TrainLoop({"w": np.ones(3, np.float32)}, task, n_steps_per_checkpoint=100)
    seen, start = {}, time.perf_counter()
    for checkpoint in loop(n_steps=n_steps):
        if checkpoint.step % (n_steps // 10) == 0:
            pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
            seen[checkpoint.step] = pages * resource.getpagesize() / 1e6
    each = 1e6 * (time.perf_counter() - start) / n_steps
    first, last = (seen[n_steps * i // 10] for i in (2, 10))
    print(f"memory: {n_steps} steps ({each:.0f} us each), RSS in MB {seen}")
    print(f"  from step {n_steps // 5} to the end {100 * (last / first - 1):+.2f}%")


def main():
    parser = argparse.ArgumentParser()
    sections = ["speed", "nnx", "host", "start", "memory"]
    parser.add_argument("--only", nargs="+", default=sections, choices=sections)
    parser.add_argument("--models", nargs="+", default=list(models.MODELS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peers", action="store_true")
    options = parser.parse_args()
    for section in options.only:
        if section == "speed":
            for name in options.models:
                speed(name, options.rounds, options.peers)
        else:
            run = {"nnx": nnx_step, "host": host_cost, "start": first_step}.get(section)
            run(options.rounds) if run else memory()


if __name__ == "__main__":
    main()
