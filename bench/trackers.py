"""Compares the steps per second of a run with all trackers and of the same run without.

Run: python bench/trackers.py [--models mlp cnn] [--rounds 7]
All contestants save a checkpoint with 20 metrics about once a second, and do the same steps
alternately. `files` adds metrics.jsonl and TensorBoard, which every run of the command has; `all`
adds wandb (offline), MLflow (a database) and CSV. The work that a background thread still has to
do at the end of a round is paid by the next contestant. The goal is 0.98 or more.
"""

import argparse
import contextlib
import os
import pathlib
import sys
import tempfile
import time

import jax
import optax

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import loop_models as models
import timing

import tekoa

# Steps of about a second, and points in a round.
EVERY, N_POINTS = {"mlp": 6000, "cnn": 120}, 5
CONTESTANTS = ("bare", "files", "all")


def contestant(name, kind, directory):
    """Returns a function that trains for a round, and one that closes what it has opened."""
    loop = tekoa.TrainLoop(
        models.MODELS[name](),
        tekoa.TrainTask(
            optimizer=optax.adam(1e-3), loss=models.loss, data=models.shuffled(*models.arrays(name))
        ),
        n_steps_per_checkpoint=EVERY[name],
        rng=jax.random.key(0),
        stdout=False,
    )
    stages = [] if kind == "bare" else files(directory)
    if kind == "all":
        stages += trackers(directory)
    stages.append(tekoa.CheckpointFileWriter(directory, keep=1))
    process = tekoa.serial(tekoa.Monitor(loop), *stages)

    def run():
        for checkpoint in loop(n_steps=loop.step + N_POINTS * EVERY[name]):
            process(checkpoint)
        jax.block_until_ready(loop.state)

    def close():
        for stage in reversed(stages):
            stage.close()

    return run, close


def files(directory):
    return [
        tekoa.MetricsFile(directory / "metrics.jsonl"),
        tekoa.TensorBoardWriter(directory / "train"),
    ]


def trackers(directory):
    uri = f"sqlite:///{directory}/mlflow.db"
    return [
        tekoa.Tracker("wandb", directory, mode="offline"),
        tekoa.Tracker("mlflow", directory, tracking_uri=uri),
        tekoa.Tracker("csv", directory),
    ]


def with_cpu_time(run, name, spent):
    """Returns `run`, which also notes the CPU seconds of this process."""

    def measured():
        start = time.process_time()
        run()
        spent.setdefault(name, []).append(time.process_time() - start)

    return measured


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=sorted(EVERY))
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    os.environ |= {"WANDB_SILENT": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    for name in args.models:
        # MLflow stores files of runs in the working directory.
        with tempfile.TemporaryDirectory() as root, contextlib.chdir(root):
            pairs = {k: contestant(name, k, pathlib.Path(root, k)) for k in CONTESTANTS}
            cpu = {}
            runs = {kind: with_cpu_time(run, kind, cpu) for kind, (run, _) in pairs.items()}
            seconds = timing.interleave(runs, n_rounds=args.rounds)
            for _, close in pairs.values():
                close()
        for kind in CONTESTANTS[1:]:
            median = timing.ratio(seconds, "bare", kind)
            minimum = min(seconds["bare"]) / min(seconds[kind])
            spent = min(cpu["bare"][-args.rounds :]) / min(cpu[kind][-args.rounds :])
            print(
                f"{name}, a point per {min(seconds['bare']) / N_POINTS:.2f} s: steps per second "
                f"{kind} / bare {median:.3f} (median), {minimum:.3f} (of the fastest rounds), "
                f"{spent:.3f} (by CPU time)"
            )


if __name__ == "__main__":
    main()
