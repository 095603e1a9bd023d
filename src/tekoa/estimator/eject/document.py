"""The text of an ejected file."""

import ast
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence

from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.eject import text as texts
from tekoa.estimator.eject.ran import GONE
from tekoa.estimator.replay.record import Start
from tekoa.estimator.run import cadence
from tekoa.estimator.run.run import Run

# Says in the docstring of a file where it is from.
AUTHOR = "written by `tekoa eject`"
_STANDARD = ("collections", "functools", "math", "pathlib", "types")
_OTHERS = {
    "jax": "import jax",
    "jnp": "import jax.numpy as jnp",
    "np": "import numpy as np",
    "optax": "import optax",
}
_VERSIONS = ("jax", "flax", "equinox", "haiku", "optax", "numpy")


def write(
    run: Run,
    start: Start,
    sections: Mapping[str, list[str]],
    *,
    imports: Sequence[str],
    n_steps: int,
) -> str:
    """Returns the text of the file.

    Args:
        run: The run.
        start: Its first start.
        sections: Blocks of code by title.
        imports: Lines that import packages.
        n_steps: The number of steps whose examples are stored.
    """
    body = "\n\n\n".join(
        f"# {name}\n" + "\n\n\n".join(block.strip("\n") for block in blocks if block.strip())
        for name, blocks in sections.items()
        if any(block.strip() for block in blocks)
    )
    body = "\n".join(line for line in body.splitlines() if line.strip() != GONE)
    body = texts.wrapped(texts.joined(re.sub(r"  # noqa.*", "", body)))
    _check_names(body)
    numbers = {
        "SEED": start.seed,
        "BATCH_SIZE": run.config.train_batch_size,
        "N_STEPS": n_steps,
        "PRINT_EVERY": cadence.steps_between(
            run.config.check_every_steps, run.config.save_every_steps
        ),
    }
    numbers = {name: value for name, value in numbers.items() if name in body}
    lines = _imports(body, imports)
    first = f"{', '.join(numbers)} = {', '.join(map(str, numbers.values()))}"
    return f'"""{_title(run, start, lines)}"""\n\n{lines}\n\n{first}\n\n{body}\n'


def is_ejected(text: str) -> bool:
    """Whether a file was written by this command."""
    return AUTHOR in " ".join(text.split())  # The line may be broken anywhere.


def _check_names(body: str) -> None:
    """Raises `UsageError` if a name, other than `model`, is bound twice."""
    bound: set[str] = set()
    for node in ast.parse(body).body:
        names = texts.bound_names(node) - {"model"}
        if twice := names & bound:
            raise UsageError(
                f"{min(twice)!r} would mean two things in the ejected file: rename a variable or a "
                "function of the model file to eject this run."
            )
        bound |= names


def _title(run: Run, start: Start, imports: str) -> str:
    """Returns the docstring: what the file is and what it reproduces."""
    versions = start.facts.get("versions", {})
    used = [f"{n} {versions[n]}" for n in _VERSIONS if n in versions and n in f"{imports} jax"]
    device = start.facts.get("devices", {}).get("kind", "the device of the run")
    name = run.module.__name__.rpartition(".")[2]
    text = (
        f"Its losses have the bits of the run with {', '.join(used)} on {device}. The examples, in "
        "the order of the run, are in the .npz file beside it."
    )
    title = f"The run {start.directory.name!r} of {name} as a plain program, {AUTHOR}."
    return f"{textwrap.fill(title, 96)}\n\n{textwrap.fill(text, 96)}\n"


def _imports(body: str, others: Sequence[str]) -> str:
    """Returns the import lines of the file, those of Python itself first."""
    names = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    used = {f"import {name}" for name in _STANDARD if name in names}
    used |= {"from collections.abc import Callable"} if "Callable" in names else set()
    lines = {line for name, line in _OTHERS.items() if name in names}
    lines |= {line for line in others if line and line.split()[-1].partition(".")[0] in names}
    standard = {line for line in lines if _root(line) in sys.stdlib_module_names} | used
    first, rest = sorted(standard, key=_import_order), sorted(lines - standard, key=_import_order)
    return "\n".join([*first, "", *rest])


def _import_order(line: str) -> tuple[bool, str]:
    return line.startswith("from"), line


def _root(line: str) -> str:
    return line.split()[1].partition(".")[0]
