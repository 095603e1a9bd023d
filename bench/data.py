"""Compares the data layer with plain NumPy, grain, torch's loader and a training step.

Run: python bench/data.py [--repeats N] [--only NAME ...]. Contestants are measured alternately, and
medians and ratios are printed. Those whose package is missing are left out: grain is in the
`records` extra, torch and datasets are in `ecosystem-test`.
"""

import argparse
import functools
import importlib.util
import itertools
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


class Rows:
    """Arrays as a sequence of examples, for loaders that read one example at a time."""

    def __init__(self, arrays):
        self._arrays, self._length = arrays, len(next(iter(arrays.values())))

    def __len__(self):
        return self._length

    def __getitem__(self, at):
        return {key: array[at] for key, array in self._arrays.items()}


def grain_batches(rows, batch_size=BATCH, transform=None, dataset=None):
    import grain

    dataset = grain.MapDataset.source(rows).seed(0) if dataset is None else dataset
    dataset = dataset.shuffle(seed=0) if rows is not None else dataset
    if transform is not None:
        dataset = dataset.random_map(transform)
    dataset = dataset.repeat().batch(batch_size)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def torch_batches(rows, batch_size=BATCH, **options):
    import torch.utils.data

    options = {"shuffle": True, **options}
    loader = torch.utils.data.DataLoader(rows, batch_size=batch_size, drop_last=True, **options)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def has(package):
    return importlib.util.find_spec(package) is not None


def compare(title, contestants, repeats, n_batches):
    """Measures contestants alternately; prints their medians and the speed of the first."""
    times = {name: [] for name in contestants}
    for iterator in contestants.values():
        next(iterator)
    for _ in range(repeats):
        for name, iterator in contestants.items():
            # CPU time, not wall-clock time: the cores may be shared.
            times[name].append(seconds_per_batch(iterator, n_batches[name], time.process_time))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, value in medians.items():
        ratio = value / medians["tekoa"]
        print(f"{title:9} {name:12} {value * 1e6:10.2f} us per batch, tekoa {ratio:.2f} x as fast")


def compare_loops(repeats):
    arrays = mnist_size()
    contestants = {
        "tekoa": data.as_source(arrays).batches(BATCH, shuffle=True),
        "bare numpy": bare_numpy(arrays),
    }
    if has("grain"):
        contestants["grain"] = grain_batches(Rows(arrays))
    if has("torch"):
        contestants["torch"] = torch_batches(Rows(arrays))
    n_batches = {"tekoa": 3750, "bare numpy": 3750, "grain": 200, "torch": 200}
    compare("arrays", contestants, repeats, n_batches)


def examples(repeats):
    """Sequences of examples: no loader can gather rows of arrays."""
    rows = Rows({key: array[:5000] for key, array in mnist_size().items()})
    rows = [rows[at] for at in range(len(rows))]
    contestants = {"tekoa": data.as_source(rows).batches(BATCH, shuffle=True)}
    if has("grain"):
        contestants["grain"] = grain_batches(rows)
    if has("torch"):
        contestants["torch"] = torch_batches(rows)
    compare("examples", contestants, repeats, dict.fromkeys(contestants, 200))


def shifted(example, rng):
    return {**example, "image": np.roll(example["image"], rng.integers(-2, 3), axis=0)}


class Shifted(Rows):
    """The same augmentation inside of a dataset, as for torch."""

    def __getitem__(self, at):
        return shifted(super().__getitem__(at), np.random.default_rng(at))


def augmentation(repeats):
    arrays = mnist_size()
    contestants = {
        "tekoa": data.as_source(arrays).map_with_rng(shifted).batches(BATCH, shuffle=True)
    }
    if has("grain"):
        contestants["grain"] = grain_batches(Rows(arrays), transform=shifted)
    if has("torch"):
        contestants["torch"] = torch_batches(Shifted(arrays))
    compare("augment", contestants, repeats, dict.fromkeys(contestants, 100))


def mixing(repeats):
    parts = {name: mnist_size() for name in "abc"}
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    sources = {name: data.as_source(arrays) for name, arrays in parts.items()}
    contestants = {"tekoa": data.mix(sources, weights).batches(BATCH, shuffle=True)}
    if has("grain"):
        import grain

        shuffled = [grain.MapDataset.source(Rows(p)).shuffle(seed=0) for p in parts.values()]
        mixed = grain.MapDataset.mix(shuffled, weights=list(weights.values()))
        contestants["grain"] = grain_batches(None, dataset=mixed)
    if has("torch"):
        import torch.utils.data

        rows = torch.utils.data.ConcatDataset([Rows(arrays) for arrays in parts.values()])
        of_row = np.repeat(list(weights.values()), N)
        sampler = torch.utils.data.WeightedRandomSampler(of_row, 3 * N)
        contestants["torch"] = torch_batches(rows, shuffle=None, sampler=sampler)
    n_batches = {"tekoa": 3000, "grain": 200, "torch": 200}
    compare("mixing", contestants, repeats, n_batches)


def documents(n=20_000):
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(5, 0.8, n).astype(int) + 1, 1024)
    return [{"tokens": rng.integers(0, 30_000, size).astype(np.int32)} for size in lengths]


def packing(repeats):
    rows = documents()
    start = time.process_time()
    packed = data.as_source(rows).pack(1024)
    seconds = time.process_time() - start
    padding = packed.info.facts["padding"]
    print(f"packing   {len(rows)} documents planned in {seconds:.2f} s CPU, {padding:.2%} padding")
    contestants = {"tekoa": packed.batches(BATCH, shuffle=True)}
    if has("grain"):
        import grain

        shuffled = (
            grain.MapDataset.source(rows)
            .shuffle(seed=0)
            .repeat()
            .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        )
        first_fit = grain.experimental.FirstFitPackIterDataset(
            shuffled, length_struct={"tokens": 1024}, num_packing_bins=64
        )
        contestants["grain"] = iter(first_fit.batch(BATCH))
        filled = [(next(contestants["grain"])["tokens_segment_ids"] > 0).mean() for _ in range(40)]
        print(f"packing   grain's first fit with 64 bins: {1 - np.mean(filled):.2%} padding")
    compare("packing", contestants, repeats, dict.fromkeys(contestants, 20))


def saved_dataset(repeats):
    if not has("datasets"):
        return
    import datasets

    arrays = mnist_size()
    flat = {
        "image": arrays["image"][:10_000].reshape(10_000, -1),
        "label": arrays["label"][:10_000],
    }
    rows = datasets.Dataset.from_dict(flat)
    contestants = {"tekoa": data.as_source(rows).batches(BATCH, shuffle=True)}
    if has("grain"):
        contestants["grain"] = grain_batches(rows.with_format("numpy"))
    if has("torch"):
        contestants["torch"] = torch_batches(rows.with_format("torch"))
    compare("datasets", contestants, repeats, dict.fromkeys(contestants, 40))


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


class Slow(Rows):
    """The slow map inside of a dataset, as for torch."""

    def __getitem__(self, at):
        return slow_map(super().__getitem__(at))


def worker_processes(repeats):
    """Measures worker processes, by the clock, with a map function of about 0.1 ms per example."""
    arrays = mnist_size()
    source = data.as_source(arrays).map(slow_map)
    loops = {f"tekoa {n}": source.batches(BATCH, shuffle=True, workers=n) for n in (0, 1, 2)}
    if has("torch"):
        loops["torch 2"] = torch_batches(
            Slow(arrays), num_workers=2, persistent_workers=True, multiprocessing_context="spawn"
        )
    times = {name: [] for name in loops}
    for batches in loops.values():
        next(batches)
    for _ in range(repeats):
        for name, batches in loops.items():
            times[name].append(seconds_per_batch(batches, 60))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, value in medians.items():
        ratio = medians["tekoa 0"] / value
        print(f"slow map, {name} workers: {value * 1e3:.2f} ms per batch, {ratio:.2f}x no workers")
    for n in (0, 1, 2):
        loops[f"tekoa {n}"].close()


PARTS = {
    "arrays": compare_loops,
    "examples": examples,
    "augmentation": augmentation,
    "mixing": mixing,
    "packing": packing,
    "datasets": saved_dataset,
    "step": share_of_step,
    "restore": restoring,
    "text": lambda repeats: long_text(),
    "workers": worker_processes,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{arguments.repeats} repeats, alternately; {os.cpu_count()} cores, load {load:.1f}")
    for name in arguments.only:
        PARTS[name](arguments.repeats)


if __name__ == "__main__":
    main()
