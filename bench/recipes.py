"""Compares LBFGS in the loop with an unjitted NNX loop, and adapters with nnx.LoRA.

    python bench/recipes.py

Times are CPU seconds of this process, including compilation, so that other work on the machine does
not count. Each is measured once, because the unjitted loop takes minutes.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tekoa

N_STEPS = 50


def make_model():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(2, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs))


def loss_fn(out, y):
    return jnp.mean((out - y) ** 2)


def make_batch():
    rngs = nnx.Rngs(1)
    return np.asarray(rngs.normal((32, 2))), np.asarray(rngs.normal((32, 8)))


def by_hand():
    """Runs each step operation by operation, as in the cookbook of Flax."""
    model, (x, y) = make_model(), make_batch()
    optimizer = nnx.Optimizer(model, optax.lbfgs(1e-3), wrt=nnx.Param)
    graph = nnx.graphdef(model)

    def of_model(model):
        return loss_fn(model(x), y)

    losses = []
    for _ in range(N_STEPS):
        value, grads = nnx.value_and_grad(of_model)(model)
        optimizer.update(
            model,
            grads,
            grad=grads,
            value=value,
            value_fn=lambda state: of_model(nnx.merge(graph, state)),
        )
        losses.append(float(value))
    return losses


def by_loop():
    task = tekoa.TrainTask(optimizer=optax.lbfgs(1e-3), loss=loss_fn, data=[make_batch()] * N_STEPS)
    loop = tekoa.TrainLoop(
        make_model(), task, n_steps=N_STEPS, n_steps_per_checkpoint=1, grads=False
    )
    return [float(checkpoint.loss) for checkpoint in loop]


def timed(run):
    began, wall = time.process_time(), time.perf_counter()
    result = run()
    return result, time.process_time() - began, time.perf_counter() - wall


def compare_lbfgs():
    loop, loop_cpu, loop_wall = timed(by_loop)
    hand, hand_cpu, hand_wall = timed(by_hand)
    print(f"LBFGS, {N_STEPS} steps by the loop: {loop_cpu:.1f} s CPU, {loop_wall:.1f} s wall")
    print(f"  by hand, not jitted: {hand_cpu:.1f} s CPU, {hand_wall:.1f} s wall")
    print(f"  that is {hand_cpu / loop_cpu:.1f} x; last losses {loop[-1]:.7f} and {hand[-1]:.7f}")


def compare_adapters(width=512, n_rows=256, n_repeats=20):
    """Compares the gradient with A @ B merged into W and with A and B applied in turn."""

    def layers():
        rngs = nnx.Rngs(0)
        return [nnx.Linear(width, width, rngs=rngs) for _ in range(4)]

    base = nnx.Sequential(*layers())
    wrapped = nnx.Sequential(
        *(nnx.LoRA(width, 4, width, base_module=layer, rngs=nnx.Rngs(1)) for layer in layers())
    )
    x = np.ones((n_rows, width), np.float32)
    merged_fns = tekoa.lora(base, rank=4, where="kernel$")
    params, variables = merged_fns.init(jax.random.key(0), (x,))
    graph, adapters, rest = nnx.split(wrapped, nnx.LoRAParam, ...)

    def merged(params):
        rng = jax.random.key(0)
        return jnp.sum(merged_fns.apply(params, variables, (x,), rng=rng, train=True)[0] ** 2)

    def in_turn(adapters):
        return jnp.sum(nnx.merge(graph, adapters, rest)(x) ** 2)

    programs = {"merged": (merged, params), "in turn": (in_turn, adapters)}
    steps = {name: (jax.jit(jax.grad(fn)), given) for name, (fn, given) in programs.items()}
    seconds = {name: [] for name in steps}
    for step, given in steps.values():
        jax.block_until_ready(step(given))
    for _ in range(n_repeats):
        for name, (step, given) in steps.items():
            began = time.process_time()
            jax.block_until_ready(step(given))
            seconds[name].append(time.process_time() - began)
    medians = {name: np.median(values) for name, values in seconds.items()}
    ratio = medians["merged"] / medians["in turn"]
    print(f"Adapters, 4 layers of {width}, {n_rows} rows: gradient {ratio:.2f} x that of nnx.LoRA")
    print("  " + ", ".join(f"{name} {1e3 * value:.1f} ms CPU" for name, value in medians.items()))


if __name__ == "__main__":
    compare_adapters()
    compare_lbfgs()
