"""Fuzzes the readers: changes valid files at random and reports what is not a documented error.

Run by hand, for example `python tests/faults/fuzz npz manifest --seconds 600`; without names, all
kinds are fuzzed one after the other. Changed inputs that reach new lines of Tekoa are
changed further. A worker process reads the files, so that a crash or a hang is an outcome too.
Each finding is kept in a directory below `--out`, with the input and what happened.
"""

import argparse
import faulthandler
import os
import pathlib
import random
import resource
import shutil
import subprocess
import sys
import time
import traceback

import kinds
from changes import change

MAX_SECONDS = 200  # A reader that waits; the program may run at the lowest priority.
MAX_CPU_SECONDS = 5
MAX_GROWN_MIB = 512
MAX_POOL = 500
PACKAGE = "/tekoa/"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", choices=[[], *kinds.KINDS])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("fuzz"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.absolute()
    for kind in options.kinds or kinds.KINDS:
        if options.worker:
            work(kind, options)
        else:
            supervise(kind, options)


def supervise(kind, options):
    """Restarts the worker after each crash or hang, until the time is over."""
    deadline, seed, n_runs, n_seconds = time.monotonic() + options.seconds, options.seed, 0, 0.0
    while (remaining := deadline - time.monotonic()) > 1:
        start = time.monotonic()
        arguments = [f"--seconds={remaining}", f"--seed={seed}", f"--out={options.out}", "--worker"]
        worker = subprocess.run(
            [sys.executable, pathlib.Path(__file__).parent, kind, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        n_seconds += time.monotonic() - start
        counts = worker.stdout.splitlines()
        n_runs += int(counts[-1]) if counts and counts[-1].isdigit() else 0
        if worker.returncode != 0:
            scratch = options.out / f"{kind}.scratch"
            report = f"The worker ended with {worker.returncode}.\n{worker.stderr[-4000:]}"
            keep(options.out, kind, f"ended-{worker.returncode}", scratch, report)
        seed += 1
    found = sorted(path.name for path in options.out.glob(f"{kind}-*"))
    print(f"{kind}: {n_runs} inputs in {n_seconds:.0f} s, findings: {found}", flush=True)


def keep(out, kind, name, scratch, report):
    """Keeps the input of a finding, once for each name."""
    finding = out / f"{kind}-{name}"
    if not finding.exists():
        shutil.copytree(scratch, finding, symlinks=True, ignore_dangling_symlinks=True)
        (finding / "FINDING.txt").write_text(report)


def work(kind, options):
    """Reads changed inputs until the time is over, and prints their number."""
    scratch = options.out / f"{kind}.scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    os.chdir(scratch)
    rng = random.Random(f"{kind} {options.seed}")
    target = kinds.KINDS[kind](scratch)
    pool, seen = list(target.inputs), set()
    for value in pool:
        target.write(value)
        outcome = attempt(target, seen)
        assert outcome is None, f"A valid input of {kind} is refused: {outcome}"
    peak = peak_mib()
    deadline, n_runs = time.monotonic() + options.seconds, 0
    while time.monotonic() < deadline:
        value = change(rng.choice(pool), rng, target.words)
        try:
            target.write(value)
        except (ValueError, TypeError, AttributeError, LookupError, OverflowError):
            continue  # Such a value has no form as a file.
        n_lines, start = len(seen), time.process_time()
        outcome = attempt(target, seen)
        n_runs += 1
        if outcome is not None:
            keep(options.out, kind, *outcome_of(outcome, scratch))
        if (n_seconds := time.process_time() - start) > MAX_CPU_SECONDS:
            keep(options.out, kind, f"slow-{n_runs}", scratch, f"It took {n_seconds:.1f} s.")
        if peak_mib() > peak + MAX_GROWN_MIB:
            report = f"Peak memory grew from {peak} to {peak_mib()} MiB."
            keep(options.out, kind, f"memory-{n_runs}", scratch, report)
            peak = peak_mib()
        if len(seen) > n_lines and len(pool) < MAX_POOL:
            pool.append(value)
        if n_runs % 100 == 0:
            print(n_runs, flush=True)
    print(n_runs, flush=True)


def attempt(target, seen):
    """Reads what was written; returns an error that is not a documented one."""
    faulthandler.dump_traceback_later(MAX_SECONDS, exit=True)
    sys.settrace(tracer(seen))
    try:
        target.read()
    except target.expected:
        return None
    except BaseException as error:
        return error
    finally:
        sys.settrace(None)
        faulthandler.cancel_dump_traceback_later()


def tracer(seen):
    """Returns a trace function that collects the lines of Tekoa that are reached."""

    def trace_lines(frame, event, _):
        seen.add((frame.f_code, frame.f_lineno))
        return trace_lines

    def trace_calls(frame, event, _):
        return trace_lines if PACKAGE in frame.f_code.co_filename else None

    return trace_calls


def outcome_of(error, scratch):
    """Returns a name for an error by its kind and place, the input, and the traceback."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    own = [f for f in traceback.extract_tb(error.__traceback__) if PACKAGE in f.filename]
    place = own[-1] if own else place
    name = f"{type(error).__name__}-{pathlib.Path(place.filename).stem}-{place.lineno}"
    return name, scratch, "".join(traceback.format_exception(error))


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__":
    main()
