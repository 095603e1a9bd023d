"""A program that saves in a loop, for the fault cases; runs in a separate process.

Its state is a sequence that anyone can compute, so every checkpoint can be checked.
"""

import argparse
import json
import os
import sys
import time

import numpy as np


def advance(x):
    return x * np.uint32(1664525) + np.uint32(1013904223)


def state_at(step, size):
    x = np.arange(size, dtype=np.uint32)
    for _ in range(step):
        x = advance(x)
    return x


def parse(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--leaves", type=int, default=2)
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--fatal-after", type=int, default=3)
    parser.add_argument(
        "--end", choices=["close", "just_end", "sys_exit", "raise"], default="close"
    )
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="for long runs that nobody reads")
    parser.add_argument("--grace", type=float, default=60.0)
    return parser.parse_args(argv)


def say(**facts):
    print(json.dumps({"time": time.time(), **facts}), flush=True)


def run(options):
    import jax.numpy as jnp

    from tekoa import store
    from tekoa.store import errors
    from tekoa.store.commit import paths

    try:
        writer = store.Store(
            options.directory,
            keep=[store.KeepLast(options.keep)],
            fatal_after=options.fatal_after,
            grace_seconds=options.grace,
        )
        left = [
            str(p) for kind in ("tmp", "trash") for p in paths.unfinished(options.directory, kind)
        ]
        shape = {str(i): jnp.zeros(options.size, jnp.uint32) for i in range(options.leaves)}
        restored = writer.restore({"model_params": shape})
    except errors.StoreError as error:
        say(event="refused", message=str(error))
        sys.exit(error.exit_code)
    step = 0 if restored is None else restored.step
    x = state_at(step, options.size)
    wrong = restored is not None and not all(
        np.array_equal(leaf, x) for leaf in restored.items["model_params"].values()
    )
    skipped = [] if restored is None else [skip.reason for skip in restored.skipped]
    say(event="start", step=step, wrong=wrong, left=left, skipped=skipped, pid=os.getpid())
    try:
        train(options, writer, step, x)
    except errors.StoreError as error:
        say(event="failed", message=str(error))
        sys.exit(error.exit_code)


def train(options, writer, step, x):
    import jax.numpy as jnp

    while step < options.steps:
        x = advance(x)
        step += 1
        time.sleep(options.sleep)
        writer.poll()
        if step % options.every == 0:
            tree = {str(i): jnp.asarray(x) for i in range(options.leaves)}
            writer.save(step, {"model_params": tree}, meta={"step": step})
            if not options.quiet:
                say(event="saving", step=step)
            if options.wait:
                writer.wait()
                say(event="saved", step=step)
    if options.end == "close":
        writer.close()
        say(event="end", step=step)
    elif options.end == "sys_exit":
        sys.exit(0)
    elif options.end == "raise":
        raise RuntimeError("the user's own mistake")


if __name__ == "__main__":
    import logging

    options = parse(sys.argv[1:])
    logging.basicConfig(level=logging.WARNING if options.quiet else logging.INFO)
    logging.getLogger("absl").setLevel(logging.WARNING)
    run(options)
