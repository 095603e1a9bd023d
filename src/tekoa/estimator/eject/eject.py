"""`tekoa eject` writes a run as one plain Python file, without Tekoa.

The file needs JAX, NumPy, optax and the library of the model. It contains the model, the settings
of the run, the order of the batches and the training step, and its losses have the bits of the run
on the same device with the same versions. The examples are written beside it, as .npz.

Flags:
  --out=FILE  the file to write (default: NAME.py, where NAME is that of the run's directory)

Example: tekoa eject runs/mnist --out=mnist_plain.py
"""

import inspect
import itertools
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tekoa.core import files
from tekoa.data import DataError, Info
from tekoa.data.batching import permutation
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.eject import pieces
from tekoa.estimator.eject.source import ModelSource, read_model
from tekoa.estimator.model_file.program import program_of
from tekoa.estimator.model_file.short import ShortProgram
from tekoa.estimator.replay import arguments as arguments_lib
from tekoa.estimator.replay.record import Start, read_record
from tekoa.estimator.run import run as runs
from tekoa.optim import named
from tekoa.store.commit import durable

USAGE = "tekoa eject RUN [--out=FILE]"

_MAX_BYTES = 2 * 10**9
_N_CHECKED = 200
# Flags that change the steps in a way that the plain file does not have.
_PLAIN = {
    "optimizer": None,
    "param_groups": None,
    "lora_rank": None,
    "accumulate": 1,
    "precision": "float32",
    "clip_norm": None,
    "grad_noise": None,
    "checkpoint_path": None,
    "train_consecutive": None,
    "mesh": None,
    "num_partitions": 1,
}


def eject(
    directory: str | os.PathLike[str], out: str | os.PathLike[str] | None = None
) -> pathlib.Path:
    """Writes a run of `tekoa train` as one plain Python file, and its examples beside it.

    Args:
        directory: The directory of the run, which does not change.
        out: The file to write; by default NAME.py in the working directory.

    Returns:
        The file.

    Raises:
        UsageError: If the run uses something that has no plain equivalent; it says what.

    >>> eject('runs/none')
    Traceback (most recent call last):
        ...
    tekoa.estimator.cli.run_config.UsageError: ...runs/none has no run.json: it is not ...
    """
    record = read_record(directory)
    start = record.starts[0]
    run = runs.open_run(start.config())
    _check_flags(run)
    program = program_of(run, "train")
    if not isinstance(program, ShortProgram):
        raise UsageError(
            f"{run.module.__name__} is a model file in the long form, with a training step of its "
            "own, and cannot be ejected."
        )
    _check_optimizer(program)
    text = inspect.getsource(run.module)
    source = read_model(text, pathlib.Path(run.module.__file__ or "").name)
    rows = _rows(program)
    target = pathlib.Path(f"{record.directory.name}.py") if out is None else files.local_path(out)
    if target.suffix != ".py":
        raise UsageError(f"--out={target} must end with .py.")
    _check_batches(rows, program, start)
    code = _write(run, start, program, source, rows)
    fields: dict[str, Any] = dict(rows)
    with open(target.with_suffix(".npz"), "wb") as file:
        np.savez(file, **fields)
    durable.replace(target, code.encode())
    return target


def run_eject(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit code."""
    parser = arguments_lib.Arguments("eject", "RUN")
    parser.add_argument("--out")
    parsed = parser.parse(arguments)
    target = eject(parsed.RUN, parsed.out)
    n_lines = len(target.read_text().splitlines())
    print(f"Wrote {target} ({n_lines} lines) and its data, {target.with_suffix('.npz')}.")
    return 0


def _check_flags(run: runs.Run) -> None:
    changed = [name for name, plain in _PLAIN.items() if getattr(run.config, name) != plain]
    if changed:
        names = ", ".join(f"--{name}" for name in changed)
        raise UsageError(f"{run.model_dir} was trained with {names}, and cannot be ejected.")


def _check_optimizer(program: ShortProgram) -> None:
    optimizer = program.train_parts((), None).optimizer
    if isinstance(optimizer, named.NamedOptimizer):
        raise UsageError(
            f"The optimizer {optimizer.name!r} is chosen by Tekoa, so that this run cannot be "
            "ejected. Models that create an optax optimizer, or Amos, can."
        )


def _rows(program: ShortProgram) -> dict[str, np.ndarray]:
    """Returns all training examples."""
    source = program.source("train")
    try:
        n = len(source)
    except (TypeError, DataError):
        raise UsageError(f"{source.info.name} has no length, and cannot be ejected.") from None
    sizes = (
        np.prod(s) * np.dtype(source.info.dtypes[k]).itemsize for k, s in source.info.shapes.items()
    )
    n_bytes = n * sum(map(int, sizes))
    if n_bytes > _MAX_BYTES:
        raise UsageError(
            f"The examples take {n_bytes / 1e9:.1f} GB, too many for a file beside it."
        )
    rows = next(source.batches(n, epochs=1))
    if not isinstance(rows, dict):
        raise UsageError("Only examples that are dicts of arrays can be ejected.")
    return rows


def _write(
    run: runs.Run,
    start: Start,
    program: ShortProgram,
    source: ModelSource,
    rows: dict[str, np.ndarray],
) -> str:
    """Returns the text of the file."""
    config, n_rows = run.config, len(next(iter(rows.values())))
    library, model_code = _model_code(program)
    order = pieces.IN_ORDER
    if config.train_shuffle_buf:
        is_short = n_rows <= permutation.MAX_TABLE
        permuted = pieces.SHORT_PERMUTATION if is_short else pieces.LONG_PERMUTATION
        order = f"{pieces.HASHES}\n\n{permuted}"
    blocks = [
        *([pieces.AMOS] if source.uses_amos else []),
        source.code,
        order,
        pieces.BATCH,
        model_code,
        pieces.TRAINING,
    ]
    body = "\n\n\n".join(block.strip("\n") for block in blocks)
    head = [
        f'"""Trains the model of {run.module.__name__} without Tekoa: same batches and losses."""',
        "",
        "from __future__ import annotations",
        "",
        *_imports(body, [*source.imports, library]),
        "",
        f"SEED, BATCH_SIZE, N_STEPS = {start.seed}, {config.train_batch_size}, "
        f"{start.facts.get('n_steps')}",
        f"CHECK_EVERY = {config.check_every_steps}",
        *source.stand_ins,
        "",
        "",
        "class Settings(dict):",
        '    """Settings by name, as keys or attributes."""',
        "",
        "    __getattr__ = dict.__getitem__",
        "",
        "",
        f"config = {_settings(start.facts['settings'])}",
        *_data_facts(program.source("train").info, n_rows, config.train_batch_size),
    ]
    return "\n".join(head) + f"\n\n\n{body}\n"


def _imports(body: str, others: Sequence[str]) -> list[str]:
    """Returns the import lines of the file, those of Python itself first."""
    standard = ["functools", "math", "pathlib", "re", "types"]
    used = [f"import {n}" for n in standard if n == "types" or re.search(rf"\b{n}\.", body)]
    own = ["import jax", "import jax.numpy as jnp", "import numpy as np", "import optax"]
    if "vars(math)" in body:
        used.append("import math")
    lines = sorted({*own, *others} - set(used), key=lambda line: (line.startswith("from"), line))
    return [*sorted(set(used)), "", *lines]


def _data_facts(info: Info, n_rows: int, batch_size: int) -> list[str]:
    """Returns the lines that describe the data to the model."""
    shapes = {name: tuple(shape) for name, shape in info.shapes.items()}
    return [
        "data = types.SimpleNamespace(",
        "    info=types.SimpleNamespace(",
        f"        name={info.name!r},",
        f"        shapes={shapes!r},",
        f"        n_classes={info.n_classes!r},",
        f"        value_range={info.value_range!r},",
        "    ),",
        f"    n_examples={n_rows},",
        "    batch_size=BATCH_SIZE,",
        f"    n_batches={max(1.0, n_rows / batch_size)!r},",
        ")",
    ]


def _settings(value: Any) -> str:
    """Returns settings as code."""
    if isinstance(value, dict):
        return "Settings(" + ", ".join(f"{k}={_settings(v)}" for k, v in value.items()) + ")"
    return repr(value)


def _model_code(program: ShortProgram) -> tuple[str, str]:
    """Returns the import of the model's library and the code that runs the model."""
    model = program.train_parts((), None).model
    kinds = {base.__module__.partition(".")[0]: base for base in type(model).__mro__}
    modules = " ".join(base.__module__ for base in type(model).__mro__)
    arguments = inspect.signature(type(model).__call__).parameters
    if "flax.linen" in modules:
        modes = {"train": True, "training": True, "is_training": True, "deterministic": False}
        on = [
            (n, v) for n, v in modes.items() if n in arguments and getattr(model, n, None) is None
        ]
        return "from flax import linen as nn", pieces.LINEN.format(
            on="".join(f", {n}={v}" for n, v in on), off="".join(f", {n}={not v}" for n, v in on)
        )
    if "flax.nnx" in modules:
        return "from flax import nnx", pieces.NNX
    if "equinox" in kinds:
        return "import equinox as eqx", pieces.EQUINOX.format(takes_key="key" in arguments)
    raise UsageError(
        f"A model of type {type(model).__name__} cannot be ejected: only modules of Linen, NNX and "
        "Equinox (without state)."
    )


def _check_batches(rows: dict[str, np.ndarray], program: ShortProgram, start: Start) -> None:
    """Raises if the batches of the run are not rows in the order of the ejected file."""
    n, flags = len(next(iter(rows.values()))), start.facts["flags"]
    for i, batch in enumerate(itertools.islice(program.train_batches(start.seed), _N_CHECKED)):
        size = flags["train_batch_size"]
        epochs, at = np.divmod(i * size + np.arange(size), n)
        if flags["train_shuffle_buf"]:
            pairs = zip(at, epochs.tolist(), strict=True)
            at = np.array([permutation.permute(k, n, (start.seed, e, 0)) for k, e in pairs])
        if any(not np.array_equal(batch[name], rows[name][at]) for name in batch):
            raise UsageError(
                f"Batch {i} cannot be made from the stored examples: the data changes from epoch "
                "to epoch, or has an order of its own."
            )
