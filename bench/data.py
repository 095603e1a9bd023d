"""Compares the data layer with plain NumPy, grain and a training step; prints ratios.

Run: python bench/data.py [--repeats N]. Contestants are measured alternately and medians are
printed. The comparison with grain needs the `records` extra.
"""

import argparse
import functools
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

from tekoa import data

N, BATCH = 60_000, 32
N_LINES = 10**7


def mnist_size():
    rng = np.random.default_rng(0)
    return {
        "image": rng.integers(0, 256, (N, 28, 28, 1), dtype=np.uint8),
        "label": rng.integers(0, 10, N, dtype=np.int32),
    }


def seconds_per_batch(iterator, n_batches, clock=time.perf_counter):
    start = clock()
    for _ in range(n_batches):
        next(iterator)
    return (clock() - start) / n_batches


def bare_numpy(arrays):
    rng = np.random.default_rng(0)
    while True:
        order = rng.permutation(N)
        for start in range(0, N - BATCH + 1, BATCH):
            rows = order[start : start + BATCH]
            yield {key: array[rows] for key, array in arrays.items()}


def grain_batches(arrays):
    import grain

    class Rows:
        def __len__(self):
            return N

        def __getitem__(self, at):
            return {key: array[at] for key, array in arrays.items()}

    dataset = grain.MapDataset.source(Rows()).seed(0).shuffle().repeat().batch(BATCH)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def compare_loops(repeats):
    arrays = mnist_size()
    loops = {
        "tekoa": (data.as_source(arrays).batches(BATCH, shuffle=True), 3750),
        "bare numpy": (bare_numpy(arrays), 3750),
        "grain": (grain_batches(arrays), 200),
    }
    times = {name: [] for name in loops}
    for _ in range(repeats):
        for name, (iterator, n_batches) in loops.items():
            # CPU time, not wall-clock time: the cores may be shared.
            times[name].append(seconds_per_batch(iterator, n_batches, time.process_time))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, value in medians.items():
        print(f"{name:12} {value * 1e6:9.2f} us per batch of {BATCH}")
    for name, goal in (("bare numpy", 1), ("grain", 20)):
        print(f"speed relative to {name}: {medians[name] / medians['tekoa']:.2f}x (goal {goal}x)")
    return medians["tekoa"]


def cnn_step():
    """Returns a training step of the MNIST CNN: conv 32, conv 64, dense 256, plain SGD."""
    import jax
    import jax.numpy as jnp

    shapes = [(3, 3, 1, 32), (3, 3, 32, 64), (7 * 7 * 64, 256), (256, 10)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = [0.05 * jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]

    def loss(params, batch):
        x = batch["image"].astype(jnp.float32) / 255
        for kernel in params[:2]:
            x = jax.nn.relu(
                jax.lax.conv_general_dilated(
                    x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            )
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
        x = jax.nn.relu(x.reshape(len(x), -1) @ params[2]) @ params[3]
        return -jnp.mean(jax.nn.log_softmax(x)[jnp.arange(len(x)), batch["label"]])

    @functools.partial(jax.jit, donate_argnums=0)
    def step(params, batch):
        grads = jax.grad(loss)(params, batch)
        return [p - 0.01 * g for p, g in zip(params, grads, strict=True)]

    return step, params


def share_of_step(repeats):
    """Compares the host time of a batch, including transfer and position, with a step."""
    step, params = cnn_step()
    batches = data.device_prefetch(data.as_source(mnist_size()).batches(BATCH, shuffle=True))
    params = step(params, next(batches))
    data_times, step_times = [], []
    for _ in range(repeats):
        for _ in range(10):
            start = time.perf_counter()
            batch = next(batches)
            batches.state()
            data_times.append(time.perf_counter() - start)
            start = time.perf_counter()
            params = step(params, batch)
            params[0].block_until_ready()
            step_times.append(time.perf_counter() - start)
    mean_data, median_step = statistics.mean(data_times), statistics.median(step_times)
    share = mean_data / median_step
    print(f"data with transfer {mean_data * 1e6:.0f} us, CNN step {median_step * 1e3:.2f} ms")
    print(f"data's share of the CNN step: {share:.2%} (goal 3%)")


def restoring(repeats):
    source = data.as_source(mnist_size())
    times = {10: [], 10**6: []}
    for _ in range(5 * repeats):
        for step, values in times.items():
            batches = source.batches(BATCH, shuffle=True)
            state = {**batches.state(), "batch": step, "examples": step * BATCH}
            start = time.perf_counter()
            batches.restore(state)
            next(batches)
            values.append(time.perf_counter() - start)
    early, late = (statistics.median(values) for values in times.values())
    print(f"restore and first batch: step 10 {early * 1e6:.0f} us, step 10^6 {late * 1e6:.0f} us")
    print(f"cost at step 10^6 relative to step 10: {late / early:.2f}x (goal 1x)")


def first_batch_of(path, **options):
    """Runs in a separate process, so that its memory can be measured."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    next(data.load(path).batches(BATCH, **options))
    seconds = time.process_time() - start
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"first batch of 10^7 lines, {options}: {seconds:.2f} s CPU (goal 2 s), {grown} KB")


def long_text():
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "long.txt"
        with open(path, "w") as file:
            for start in range(0, N_LINES, 10**5):
                lines = (
                    f"line {at} of a text, with some words\n" for at in range(start, start + 10**5)
                )
                file.write("".join(lines))
        print(f"text of {N_LINES} lines, {os.path.getsize(path) / 1e6:.0f} MB")
        for options in ("{}", "{'shuffle': 10000}", "{'shuffle': True}"):
            code = f"import data; data.first_batch_of({str(path)!r}, **{options})"
            folder_of_this = pathlib.Path(__file__).parent
            subprocess.run([sys.executable, "-c", code], cwd=folder_of_this, check=True)


def slow_map(example):
    x = example["image"].astype(np.float64)
    for _ in range(20):
        x = np.sqrt(x * x + 1)
    return {"image": x.astype(np.float32), "label": example["label"]}


def worker_processes(repeats):
    """Measures worker processes with a map function of about 0.1 ms per example."""
    source = data.as_source(mnist_size()).map(slow_map)
    loops = {n: source.batches(BATCH, shuffle=True, workers=n) for n in (0, 1, 2)}
    times = {n: [] for n in loops}
    for batches in loops.values():
        next(batches)
    for _ in range(repeats):
        for n, batches in loops.items():
            times[n].append(seconds_per_batch(batches, 60))
    medians = {n: statistics.median(values) for n, values in times.items()}
    for n, value in medians.items():
        ratio = medians[0] / value
        print(
            f"expensive map, {n} workers: {value * 1e3:.2f} ms per batch, {ratio:.2f}x no workers"
        )
        loops[n].close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    print(f"medians of {repeats} repeats, measured alternately; {os.cpu_count()} cores")
    compare_loops(repeats)
    share_of_step(repeats)
    restoring(repeats)
    long_text()
    worker_processes(repeats)


if __name__ == "__main__":
    main()
