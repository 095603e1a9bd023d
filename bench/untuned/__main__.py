"""Compares `auto`, with nothing set, to AdamW at the best of ten settings and to others.

    export TEKOA_DATA=/path/to/data       folder with mnist/, ptb/ and tiny_shakespeare/
    python -m bench.untuned               all tasks, all contestants, three seeds
    python -m bench.untuned --tasks mlp cnn --contestants auto nadamw
    python -m bench.untuned --check width depth init batch nanogpt mnist [--full]
    python -m bench.untuned --page docs/untuned.md

Results are stored in bench/untuned/results.jsonl by task, contestant, seed and version, and
only what is missing is trained: an interrupted bench continues. `--page` also writes tables
and pictures into the page.
"""

import argparse
import os
import pathlib

import jax

from . import checks, contestants, report, tasks
from . import results as results_lib

RESULTS = pathlib.Path(__file__).parent / "results.jsonl"


def main() -> None:
    flags = parse_flags()
    if flags.data:
        os.environ["TEKOA_DATA"] = flags.data
    if flags.programs:
        jax.config.update("jax_compilation_cache_dir", flags.programs)
    results = results_lib.Results(flags.results, flags.stored)
    if flags.check:
        for name in flags.check:
            show(flags.page, f"check-{name}", checks.CHECKS[name](results, flags.full))
        return
    chosen = [tasks.TASKS[name] for name in flags.tasks]
    scores = report.collect(results, chosen, flags.contestants, tuple(range(flags.seeds)))
    show(flags.page, "tasks", report.task_table(scores))
    if not flags.contestants:
        return
    if "auto" in flags.contestants:
        show(flags.page, "auto", report.auto_table(scores))
    pictures = {"ratios": report.draw_ratios, "profile": report.draw_profile}
    texts = {"ratios": report.ratio_table(scores), "profile": report.profile_table(scores)}
    for name, draw in pictures.items():
        if flags.page:
            picture = flags.page.with_name(f"untuned-{name}.png")
            draw(scores, picture)
            texts[name] += f"\n\n![{name}]({picture.name})"
        show(flags.page, name, texts[name])
    failures = "\n".join(f"- {line}" for line in report.failures(scores)) or "- none"
    show(flags.page, "failures", failures)


def parse_flags() -> argparse.Namespace:
    lines = str(__doc__).split("\n", 1)
    parser = argparse.ArgumentParser(
        prog="python -m bench.untuned",
        description=lines[0],
        epilog=lines[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tasks", nargs="+", choices=tasks.TASKS, default=list(tasks.TASKS))
    names = list(contestants.CONTESTANTS)
    parser.add_argument("--contestants", nargs="*", choices=names, default=names)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--check", nargs="+", choices=checks.CHECKS, help="instead of the tasks")
    parser.add_argument("--full", action="store_true", help="checks in their published sizes")
    parser.add_argument("--stored", action="store_true", help="train nothing, show what there is")
    parser.add_argument("--data", help="in place of $TEKOA_DATA")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--programs", help="folder in which JAX stores compiled programs")
    parser.add_argument("--page", type=pathlib.Path, help="Markdown page to write into")
    return parser.parse_args()


def show(page: pathlib.Path | None, section: str, text: str) -> None:
    print(f"\n{section}\n{text}", flush=True)
    if page:
        report.write_section(page, section, text)


if __name__ == "__main__":
    main()
