"""A run that is killed five times, beside the undisturbed one: are they the same to the bit?

    python bench/killed.py --plot docs/killed.png

trains a small network on the bundled digits twice, in processes of their own. The second run is
ended by SIGKILL at five random moments and started again each time. All arrays of the last
checkpoint, the optimizer state and the random key among them, and all metrics of all checkpoints
are then compared. It takes about a minute on two cores.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

N_STEPS, EVERY, N_KILLS = 600, 10, 5
# What the machine measures: times, speeds and memory.
MEASURED = ("seconds", "train/seconds_per_step", "system/")


def train(directory):
    from flax import nnx

    import tekoa

    class Classifier(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.Linear(64, 128, rngs=rngs)
            self.dropout = nnx.Dropout(0.2, rngs=rngs)
            self.out = nnx.Linear(128, 10, rngs=rngs)

        def __call__(self, images):
            x = nnx.relu(self.hidden(images.reshape(len(images), -1) / 16))
            return self.out(self.dropout(x))

    tekoa.fit(
        Classifier(nnx.Rngs(0)),
        "digits://split=train",
        loss="cross_entropy",
        optimizer="adam",
        steps=N_STEPS,
        steps_per_check=EVERY,
        validation="digits://split=test",
        directory=directory,
        ema=0.9,
        show_progress=False,
    )


def rows_of(directory):
    path = pathlib.Path(directory, "metrics.jsonl")
    lines = path.read_text().splitlines() if path.exists() else []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:  # The last line is being written.
            break
    return rows


def metrics_of(rows):
    """Returns the rows without what differs between two runs on the same machine."""
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in rows]


def start(directory):
    return subprocess.Popen([sys.executable, __file__, "--worker", directory])


def run(directory, kill_at=()):
    """Trains to the end; returns the last step on record at each kill."""
    kills = []
    for step in kill_at:
        process = start(directory)
        while not (rows := rows_of(directory)) or rows[-1]["step"] < step:
            if process.poll() is not None:
                raise SystemExit(f"Training ended with code {process.returncode}.")
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.02))
        process.kill()
        process.wait()
        kills.append(rows_of(directory)[-1]["step"])
    process = start(directory)
    if process.wait() != 0:
        raise SystemExit(f"Training ended with code {process.returncode}.")
    return kills


def n_differing(a, b):
    """Returns how many bytes differ in two checkpoints, and the number of numbers in each."""
    import jax
    import numpy as np

    leaves_a, leaves_b = jax.tree.leaves(a), jax.tree.leaves(b)
    assert len(leaves_a) == len(leaves_b)
    n = sum(np.size(x) for x in leaves_a)
    differing = 0
    for x, y in zip(leaves_a, leaves_b, strict=True):
        bytes_x, bytes_y = (np.frombuffer(np.asarray(z).tobytes(), np.uint8) for z in (x, y))
        differing += int((bytes_x != bytes_y).sum())
    return differing, n


def draw(rows, killed_rows, kills, n_numbers, path):
    from matplotlib import figure

    image = figure.Figure(figsize=(8, 2.4), layout="constrained")
    axes = image.subplots()
    axes.plot(*curve(rows), color="0.82", linewidth=7, label="a run that is left alone")
    for i, (first, last) in enumerate(zip([0, *kills], [*kills, N_STEPS], strict=True)):
        part = [row for row in killed_rows if first <= row["step"] <= last]
        axes.plot(*curve(part), color=f"C{i}", linewidth=1.6)
    marks = [row for row in killed_rows if row["step"] in kills]
    label = "the same run, killed (SIGKILL) and started again"
    axes.plot(*curve(marks), "kx", markersize=9, markeredgewidth=2, label=label)
    axes.set(xlabel="step", ylabel="training loss", ylim=(0, None))
    title = f"{n_numbers:,} numbers in the last checkpoint, 0 bits differ"
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    image.savefig(path, dpi=160)


def curve(rows):
    return [row["step"] for row in rows], [row["train/loss"] for row in rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--plot", metavar="FILE", help="save both curves as an image")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments of the kills")
    args = parser.parse_args()
    if args.worker:
        train(args.worker)
        return
    import tekoa

    random.seed(args.seed)
    with tempfile.TemporaryDirectory() as directory:
        undisturbed, killed = f"{directory}/undisturbed", f"{directory}/killed"
        run(undisturbed)
        moments = range(EVERY, N_STEPS - EVERY, (N_STEPS - EVERY) // N_KILLS)[:N_KILLS]
        kills = run(killed, [m + random.randrange(0, N_STEPS // N_KILLS - EVERY) for m in moments])
        differing, n = n_differing(*(tekoa.load_checkpoint(path) for path in (undisturbed, killed)))
        rows, killed_rows = rows_of(undisturbed), rows_of(killed)
    are_equal = metrics_of(rows) == metrics_of(killed_rows)
    print(f"killed after steps {', '.join(map(str, kills))}")
    print(f"{n} numbers in the last checkpoint, {differing} bytes differ")
    print(f"{len(rows)} checkpoints, metrics {'equal' if are_equal else 'DIFFERENT'}")
    if differing or not are_equal:
        raise SystemExit("The runs differ.")
    if args.plot:
        draw(rows, killed_rows, kills, n, args.plot)


if __name__ == "__main__":
    main()
