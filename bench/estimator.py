"""Compares the command with a hand-written program: steps per second, help, second start.

Run: python bench/estimator.py [--only speed help start] [--rounds 5] [--steps 2000]
     [--data digits://split=train]
Contestants are processes that run alternately; ratios are medians over rounds. CPU seconds are
those of whole processes, which are more reliable than wall-clock time on a shared machine.
"""

import argparse
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import timing

from tekoa.estimator.report import events

EVERY = 100
HERE = pathlib.Path(__file__).parent
TEKOA = [sys.executable, "-m", "tekoa"]


def run(arguments, **environment):
    """Runs a process to its end; returns wall-clock seconds, CPU seconds and its output."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    done = subprocess.run(
        [str(argument) for argument in arguments],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.time() - start, cpu, done.stdout


def by_hand(pattern, directory, n_steps, saves):
    """Returns seconds per step after the first 100, and CPU seconds of the process."""
    flags = [HERE / "estimator_by_hand.py", pattern, directory, n_steps, int(saves)]
    _, cpu, shown = run([sys.executable, *flags])
    return float(shown.split()[-1]), cpu


def by_command(pattern, directory, n_steps, *flags):
    """As `by_hand`; the times are those of the TensorBoard points."""
    _, cpu, _ = run(
        [
            *TEKOA,
            *("train", "mnist", f"--model_dir={directory}", f"--train_pattern={pattern}"),
            *(f"--max_train_steps={n_steps}", "--train_epochs=1000000"),
            # Both compile in every run; otherwise the difference of two runs is not that of steps.
            *(f"--check_every_steps={EVERY}", "--random_seed=0", "--compile_cache=off", *flags),
        ]
    )
    points = events.read_curves(pathlib.Path(directory) / "train")["train/loss"]
    first, last = points[0], points[-1]
    return (last.wall_time - first.wall_time) / (last.step - first.step), cpu


def speed(n_rounds, n_steps, pattern):
    """Runs each contestant twice per round; the difference is the CPU time of the steps."""
    contestants = {
        "by hand, saving and logging": lambda d, n: by_hand(pattern, d, n, True),
        "by hand, bare": lambda d, n: by_hand(pattern, d, n, False),
        "tekoa train mnist": lambda d, n: by_command(pattern, d, n),
    }
    clock = {name: [] for name in contestants}
    cpu = {name: [] for name in contestants}
    n_short = n_steps // 4
    for _ in range(n_rounds):
        for name, contestant in contestants.items():
            with tempfile.TemporaryDirectory() as short, tempfile.TemporaryDirectory() as long:
                _, cpu_short = contestant(short, n_short)
                seconds, cpu_long = contestant(long, n_steps)
            clock[name].append(seconds)
            cpu[name].append((cpu_long - cpu_short) / (n_steps - n_short))
    print(f"{n_steps} steps of 32 from {pattern}, saved and logged every {EVERY}")
    for name in contestants:
        faster, less = (timing.ratio(found, name, "tekoa train mnist") for found in (clock, cpu))
        rates = " ".join(f"{1 / seconds:.0f}" for seconds in clock[name])
        costs = " ".join(f"{1e3 * seconds:.2f}" for seconds in cpu[name])
        print(
            f"  {name:28} steps/s {rates} (tekoa {faster:.2f}x as fast)"
            f"   CPU ms/step {costs} (its CPU {less:.2f} of tekoa's)"
        )


def show_help(n_rounds):
    seconds = [run([*TEKOA, "--help"])[:2] for _ in range(3 * n_rounds)]
    clock, cpu = ([row[i] for row in seconds] for i in (0, 1))
    print(
        f"tekoa --help: minimum {min(clock):.3f} s, median {statistics.median(clock):.3f} s; "
        f"CPU minimum {min(cpu):.3f} s, median {statistics.median(cpu):.3f} s"
    )


def first_step(cache, pattern):
    """Returns the time from process start to the first TensorBoard step, and CPU seconds."""
    with tempfile.TemporaryDirectory() as directory:
        start = time.time()
        _, cpu, _ = run(
            [
                *TEKOA,
                *("train", "mnist", f"--model_dir={directory}", f"--train_pattern={pattern}"),
                *("--max_train_steps=1", "--check_every_steps=1", f"--compile_cache={cache}"),
            ]
        )
        points = events.read_curves(pathlib.Path(directory) / "train")["train/loss"]
        return points[0].wall_time - start, cpu


def starts(n_rounds, pattern):
    print("From the start of the process to its first step:")
    pairs = []
    for _ in range(n_rounds):
        with tempfile.TemporaryDirectory() as cache:
            pairs.append([first_step(cache, pattern) for _ in range(2)])
    for i, unit in enumerate(["by the clock", "CPU"]):
        ratio = statistics.median(second[i] / first[i] for first, second in pairs)
        rounds = "  ".join(f"{first[i]:.2f}/{second[i]:.2f}" for first, second in pairs)
        print(f"  {unit:12} first/second {rounds} s; second is {ratio:.2f} of the first")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=["speed", "help", "start"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--data", default="digits://split=train")
    options = parser.parse_args()
    if "speed" in options.only:
        speed(options.rounds, options.steps, options.data)
    if "help" in options.only:
        show_help(options.rounds)
    if "start" in options.only:
        starts(options.rounds, options.data)


if __name__ == "__main__":
    main()
