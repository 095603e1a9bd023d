"""Measures the overhead of meshes, and how costs grow with the number of arrays.

Run: python bench/scale.py [--only mesh dispatch save plan] [--rounds 11] [--leaves 10 100 1000]
     [--layers 2 4 8 16 32]
Contestants of `mesh` and `dispatch` run alternately and are compared by the CPU time of the
process; ratios are medians over rounds.
"""

import argparse
import functools
import pathlib
import statistics
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import loop_models as models
import timing

import tekoa
from tekoa.core.state import Health, StepOutput, TrainState
from tekoa.estimator.modes import plan
from tekoa.loop.engine.flat_state import StateCodec
from tekoa.loop.task import ModelTraining, Options
from tekoa.models import text, transformer_lm
from tekoa.sharding.placement import Placement
from tekoa.store import store
from tekoa.store.read import restore as restore_lib

N_STEPS = {"mlp": 200, "transformer": 10}
N_CALLS = 100


def in_turn(runs, n_rounds):
    """Returns CPU seconds of each contestant by round, after one warm-up round."""
    found = {name: [] for name in runs}
    for i in range(n_rounds + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if i:
                found[name].append(time.process_time() - start)
    return found


def bench_mesh(args):
    """Compares the loop on a mesh of one device with the loop without a layout."""

    def runner(name, layout):
        task = tekoa.TrainTask(
            optimizer=optax.adam(1e-3),
            data=models.shuffled(*models.arrays(name)),
            loss=models.loss,
        )
        loop = tekoa.TrainLoop(
            models.MODELS[name](),
            task,
            layout=layout,
            n_steps_per_checkpoint=N_STEPS[name],
            steps_per_dispatch=1,
            grads=False,
        )
        return loop.next_checkpoint

    for name, n_steps in N_STEPS.items():
        one = tekoa.Layout(mesh=tekoa.make_mesh(devices=jax.devices()[:1]), rules="fsdp")
        found = in_turn({"plain": runner(name, None), "mesh": runner(name, one)}, args.rounds)
        ms = timing.milliseconds(found["plain"]) / n_steps
        times = timing.ratio(found, "mesh", "plain")
        print(f"{name:12} plain {ms:8.3f} ms per step, on a mesh x {times:.3f}")


def many_leaves(n):
    """Returns a state of n small parameters."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=zero,
        params={f"layer_{i}": {"w": jnp.full((4,), float(i))} for i in range(n)},
        variables={},
        opt_state=(),
        average=None,
        carry=None,
        rng=jax.random.key(0),
        sums={},
        health=Health.zero(),
    )


def shrunk(x):
    return x * 0.999


def bench_dispatch(args):
    """Compares passing many arrays to the loop's step with a jitted call on a plain list."""

    def step(state, batch):
        params = jax.tree.map(shrunk, state.params)
        one = jnp.ones(())
        new = state.replace(params=params, step=state.step + 1)
        return new, StepOutput(loss=one * batch, gradients_l2norm=one, weights_l2norm=one)

    for n in args.leaves:
        state = many_leaves(n)
        codec, place = StateCodec(state), Placement(None)
        flat = place.jit(codec.flat_step(step))
        bare = jax.jit(lambda leaves: [shrunk(x) for x in leaves], donate_argnums=0)
        tree = jax.jit(functools.partial(jax.tree.map, shrunk), donate_argnums=0)
        batch = np.float32(1)
        now = {
            "loop": [jnp.copy(x) for x in codec.flatten(state)],
            "bare": [jnp.copy(x) for x in jax.tree.leaves(state.params)],
            "tree": jax.tree.map(jnp.copy, state.params),
        }

        def run_loop(now=now, flat=flat, batch=batch):
            for _ in range(N_CALLS):
                now["loop"], _ = flat(now["loop"], batch)
            jax.block_until_ready(now["loop"])

        def run_one(name, call, now=now):
            for _ in range(N_CALLS):
                now[name] = call(now[name])
            jax.block_until_ready(now[name])

        runs = {
            "bare": functools.partial(run_one, "bare", bare),
            "tree": functools.partial(run_one, "tree", tree),
            "loop": run_loop,
        }
        found = in_turn(runs, args.rounds)
        us = timing.milliseconds(found["bare"]) / N_CALLS * 1e3
        loop, nested = (timing.ratio(found, name, "bare") for name in ("loop", "tree"))
        print(
            f"{n:6} arrays: plain list {us:9.1f} us per call, the loop's step x {loop:.2f}, "
            f"a nested dict x {nested:.2f}"
        )


def bench_save(args):
    """Measures saving and restoring one state, by the number of its arrays."""
    for n in args.leaves:
        state = many_leaves(n)
        items = {"model_params": state.params}
        saving, restore = [], []
        for i in range(min(3, args.rounds)):
            with tempfile.TemporaryDirectory() as folder, store.Store(folder) as opened:
                start = time.perf_counter()
                opened.save(i, items)
                opened.wait()
                saving.append(time.perf_counter() - start)
                start = time.perf_counter()
                restore_lib.restore(folder, items)
                restore.append(time.perf_counter() - start)
        print(
            f"{n:6} arrays: save {statistics.median(saving):7.3f} s, "
            f"restore {statistics.median(restore):7.3f} s"
        )


def bench_plan(args):
    """Measures planning a transformer of width 4096 on 256 devices, by number of layers."""
    mesh = jax.sharding.AbstractMesh((8, 32, 1), ("data", "fsdp", "model"))
    layout = tekoa.Layout(mesh=mesh, logical_axis_rules=transformer_lm.LOGICAL_AXIS_RULES)
    batch = {"tokens": jax.ShapeDtypeStruct((256, 2048), np.int32)}
    inputs = functools.partial(transformer_lm.shifted, start_id=0)
    for n in args.layers:
        model = transformer_lm.TransformerLM(
            256, n_layers=n, width=4096, n_heads=32, mlp_width=11008, remat=True
        )
        task = tekoa.TrainTask(
            optimizer=optax.adam(1e-3),
            data=(),
            loss=text.token_loss,
            split=lambda batch: ((inputs(batch),), (batch,)),
        )
        training = ModelTraining(tekoa.as_model_fns(model), task)
        start = time.perf_counter()
        made = plan.make_plan(training, batch, layout, Options())
        seconds = time.perf_counter() - start
        n_weights = made.parts["parameters"][0] / 4e9
        print(f"{n:4} layers, {n_weights:5.2f} billion weights: {seconds:6.2f} s")


BENCHES = {
    "mesh": bench_mesh,
    "dispatch": bench_dispatch,
    "save": bench_save,
    "plan": bench_plan,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=BENCHES, default=list(BENCHES))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--leaves", type=int, nargs="*", default=[10, 100, 1000])
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 4, 8, 16, 32])
    args = parser.parse_args()
    for name in args.only:
        print(f"-- {name}: {BENCHES[name].__doc__}", flush=True)
        BENCHES[name](args)


if __name__ == "__main__":
    main()
