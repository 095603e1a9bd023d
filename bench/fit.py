"""Compares `fit` with the same `TrainLoop`, both with and without their files.

Run: python bench/fit.py [--models mlp cnn] [--rounds 9]
Both train from scratch in turn, on the same batches, stop on signals, and check five times.
Compiled programs are reused from the first round on, so that steps, checks and files are measured.
"""

import argparse
import itertools
import pathlib
import sys
import tempfile

import jax
import optax

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import loop_models as models
import timing

import tekoa

N_STEPS = {"mlp": 2000, "cnn": 200}
N_CHECKS = 5


def source(name):
    x, y = models.arrays(name)
    return tekoa.data.as_source({"x": x, "y": y})


def with_fit(name, directories):
    def run():
        tekoa.fit(
            models.MODELS[name](),
            source(name),
            loss=models.loss,
            optimizer=optax.adam(1e-3),
            steps=N_STEPS[name],
            steps_per_check=N_STEPS[name] // N_CHECKS,
            batch_size=models.BATCH,
            directory=next(directories) if directories else None,
            show_progress=False,
        )

    return run


def with_loop(name, directories):
    def run():
        batches = source(name).batches(models.BATCH, seed=0, shuffle=True)
        loop = tekoa.TrainLoop(
            model=models.MODELS[name](),
            task=tekoa.TrainTask(
                optimizer=optax.adam(1e-3),
                loss=models.loss,
                data=batches,
                inputs="x",
                targets="y",
            ),
            n_steps=N_STEPS[name],
            n_steps_per_checkpoint=N_STEPS[name] // N_CHECKS,
            rng=jax.random.key(0),
            stdout=False,
        )
        stages = []
        if directories:
            path = pathlib.Path(next(directories))
            stages = [
                tekoa.MetricsFile(path / "metrics.jsonl"),
                tekoa.TensorBoardWriter(path / "train"),
                tekoa.CheckpointFileWriter(path),
            ]
        process = tekoa.serial(*stages)
        with tekoa.stop_flag() as loop.stop_flag:
            for checkpoint in loop:
                process(checkpoint)
        for stage in stages:
            stage.close()

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=sorted(N_STEPS))
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    cache = tempfile.mkdtemp()
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    for name, has_files in itertools.product(args.models, (False, True)):
        with tempfile.TemporaryDirectory() as root:
            numbers = itertools.count()
            directories = (f"{root}/{n}" for n in numbers) if has_files else None
            contestants = {"loop": with_loop(name, directories), "fit": with_fit(name, directories)}
            seconds = timing.interleave(contestants, n_rounds=args.rounds)
        ratio = timing.ratio(seconds, "fit", "loop")
        each = ", ".join(f"{k} {timing.milliseconds(v):.0f} ms" for k, v in seconds.items())
        files = "with files" if has_files else "in memory"
        print(f"{name}, {N_STEPS[name]} steps, {files}: fit / loop {ratio:.3f} ({each})")


if __name__ == "__main__":
    main()
