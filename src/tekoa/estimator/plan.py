"""`tekoa plan`: what a training needs on each device, told before anything is allocated.

State and batch are counted from shapes. Activations come from the compiled step where this
machine has the devices of the mesh, else from an estimate on the traced step.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from tekoa.core import sharding_mesh, sharding_peak, sharding_specs, trees
from tekoa.core.sharding import Layout
from tekoa.core.state import TrainState
from tekoa.estimator import mesh
from tekoa.estimator import run as runs
from tekoa.estimator.config import RunConfig, UsageError
from tekoa.estimator.program import program_of
from tekoa.loop.training import Options, Training

_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Bytes of a training, by part.

    Attributes:
        layout: Where things go.
        form: Shapes of the state.
        specs: How they are split.
        n_rows: Rows of a batch.
        parts: Name to bytes in all and on each device.
        is_compiled: Whether activations were read off the compiled step.
    """

    layout: Layout
    form: TrainState
    specs: TrainState
    n_rows: int
    parts: dict[str, tuple[int | None, int]]
    is_compiled: bool

    @property
    def n_bytes(self) -> int:
        """Bytes on each device."""
        return sum(n for _, n in self.parts.values())


def run_plan(config: RunConfig) -> int:
    """Prints the plan of a training; gives the exit code."""
    run = runs.open_run(config)
    program = program_of(_alone(run), "train")
    limit = parse_bytes(run.config.device_memory)
    asked: Any = {name: getattr(run.config, name) for name in ("accumulate", "ema", "precision")}
    options = Options(**asked)
    training, layout = program.training(_layout(run))
    batch = _batch(program.sample("train"), run.config.train_batch_size)
    plan = make_plan(training, batch, layout, options)
    print("\n".join(lines(plan)))
    if limit is None or plan.n_bytes <= limit:
        return 0
    raise UsageError(
        f"This does not fit: a device needs {show(plan.n_bytes)} and has {show(limit)}. "
        + advice(plan, options, limit)
    )


def make_plan(training: Training, batch: Any, layout: Layout, options: Options) -> Plan:
    """Counts what a training needs on each device of a layout.

    Args:
        training: What is run.
        batch: Shapes of a batch.
        layout: On which mesh; that may have more devices than there are.
        options: How the step is made.

    Raises:
        LayoutError: If a rule or the batch does not fit.
    """
    n_rows = jax.tree.leaves(batch)[0].shape[0]
    if n_rows % (layout.n_row_parts * options.accumulate):
        raise UsageError(
            f"A batch of {n_rows} rows does not divide among the {layout.n_row_parts} parts of "
            f"the mesh {layout} and {options.accumulate} parts in time (--accumulate)."
        )
    rng = jax.eval_shape(lambda: jax.random.key(0))
    form = jax.eval_shape(functools.partial(training.init, options=options), rng, batch)
    specs = layout.state_specs(form, training.axes(rng, batch))
    rows = jax.tree.map(lambda _: layout.row_spec, batch)
    both = lambda tree, specs: (trees.n_bytes(tree), _on_a_device(tree, specs, layout))  # noqa: E731
    gradients = both(form.params, specs.params)
    is_compiled = isinstance(layout.mesh, jax.sharding.Mesh)
    held = (_compiled if is_compiled else _estimated)(
        training, (form, batch), (specs, rows), layout, options
    )
    rest = (form.variables, form.carry, form.sums), (specs.variables, specs.carry, specs.sums)
    parts = {
        "parameters": gradients,
        "optimizer state": both(form.opt_state, specs.opt_state),
        "moving average": both(form.average, specs.average),
        "other state": both(*rest),
        "batch": both(batch, rows),
        "gradients": gradients,
        "activations": (None, max(0, held - gradients[1]) if is_compiled else held),
    }
    return Plan(
        layout=layout,
        form=form,
        specs=specs,
        n_rows=n_rows,
        parts={name: found for name, found in parts.items() if found[1]},
        is_compiled=is_compiled,
    )


def _compiled(training: Training, args: Any, specs: Any, layout: Layout, options: Options) -> int:
    step = training.make_step(options)

    def traced(state: TrainState, batch: Any) -> Any:
        with layout.active():
            return step(state, batch)

    where = layout.shardings(specs)
    given = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), args, where
    )
    made = jax.jit(traced, donate_argnums=0, out_shardings=(where[0], None))
    memory = made.lower(*given).compile().memory_analysis()
    if memory is None:
        raise UsageError(f"{jax.default_backend()!r} does not tell the memory of a program.")
    return int(memory.temp_size_in_bytes)


def _estimated(training: Training, args: Any, specs: Any, layout: Layout, options: Options) -> int:
    step = training.make_step(options, keep_grads=True)

    def gradients(state: TrainState, batch: Any) -> Any:
        with layout.active():
            new, output = step(state, batch)
        # Of a step that keeps no gradients all is counted, the update too.
        return (output.loss, output.grads) if output.grads is not None else (new, output)

    return sharding_peak.peak_bytes(gradients, args, specs, layout.mesh.shape)


def _on_a_device(tree: Any, specs: Any, layout: Layout) -> int:
    return sum(
        trees.n_bytes(x) // sharding_specs.n_parts(spec, layout.mesh.shape)
        for x, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True)
    )


def _layout(run: runs.Run) -> Layout:
    """A mesh of the devices here if they are enough, else of devices that are only thought of."""
    sizes = mesh.sizes_of(run.config)
    fixed = math.prod(size for size in sizes.values() if size is not None)
    if fixed <= len(jax.devices()):
        return mesh.make_layout(run, sharding_mesh.make_mesh(**sizes))
    full = sharding_mesh.fill_sizes(sizes, fixed)
    types = (jax.sharding.AxisType.Auto,) * len(full)
    abstract = jax.sharding.AbstractMesh(tuple(full.values()), tuple(full), axis_types=types)
    return mesh.make_layout(run, abstract)


def _alone(run: runs.Run) -> runs.Run:
    """The run on one device and one row: enough to learn what the data looks like."""
    given = {"mesh": "data=1,fsdp=1,model=1", "num_partitions": 1, "model_parallel_submesh": ()}
    rules = {"sharding_rules": None, "optimizer_rules": None, "train_batch_size": 1}
    return dataclasses.replace(run, config=dataclasses.replace(run.config, **given, **rules))


def _batch(sample: Any, n_rows: int) -> Any:
    def grown(x: Any) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)
        return jax.ShapeDtypeStruct((n_rows, *np.shape(x)[1:]), dtype)

    return jax.tree.map(grown, sample)


def lines(plan: Plan) -> Iterable[str]:
    """Shows a plan as a table."""
    yield f"Mesh {plan.layout}; {plan.n_rows} rows in a batch, {plan.layout.n_row_parts} parts."
    yield ""
    yield f"{'':24} {'in all':>10} {'on a device':>12}"
    for name, (whole, own) in plan.parts.items():
        yield f"{name:24} {show(whole) if whole is not None else '':>10} {show(own):>12}"
    yield f"{'all together':24} {'':>10} {show(plan.n_bytes):>12}"
    how = "read off the compiled step" if plan.is_compiled else "estimated on the traced step"
    yield f"Activations are {how}."
    yield ""
    yield "Parameters, and how they are split:"
    found: dict[tuple[str, str, str], int] = {}
    for name, x, spec in zip(
        trees.leaf_names(plan.form.params),
        jax.tree.leaves(plan.form.params),
        jax.tree.leaves(plan.specs.params),
        strict=True,
    ):
        row = re.sub(r"\d+", "*", "/".join(name)), f"{x.dtype}{list(x.shape)}", _show_spec(spec)
        found[row] = found.get(row, 0) + 1
    width = max(len(name) for name, *_ in found)
    for (name, shape, spec), n in found.items():
        yield f"  {name:{width}} {shape:28} {spec}{f'  ({n} times)' if n > 1 else ''}"


def _show_spec(spec: jax.P) -> str:
    axes = ["+".join(e) if isinstance(e, tuple) else e or "-" for e in spec]
    return ", ".join(axes) if any(axis != "-" for axis in axes) else "whole"


def advice(plan: Plan, options: Options, limit: int) -> str:
    """What would make a training fit that does not."""
    held = plan.parts.get("activations", (None, 0))[1]
    fixed = plan.n_bytes - held
    if fixed >= limit:
        return (
            f"State and gradients alone take {show(fixed)}: split them over more devices (--mesh, "
            "--optimizer_rules)."
        )
    n = options.accumulate
    while held * options.accumulate / n > limit - fixed:
        n *= 2
    if plan.n_rows % (n * plan.layout.n_row_parts):
        return "A smaller --train_batch_size or a larger --mesh is needed."
    return f"--accumulate={n} would need about {show(fixed + held * options.accumulate // n)}."


def parse_bytes(text: str | None) -> int | None:
    """Reads a size such as 16GB or 80GiB.

    Raises:
        UsageError: If it is none.

    >>> parse_bytes('1.5GB')
    1500000000
    """
    if text is None:
        return None
    found = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", text)
    unit = found.group(2).upper() if found else ""
    if found is None or (unit and unit not in _UNITS) or found.group(1).count(".") > 1:
        raise UsageError(f"--device_memory must be a size such as 16GB or 80GiB, got {text!r}.")
    return int(float(found.group(1)) * _UNITS.get(unit, 1))


def show(n_bytes: int) -> str:
    """Shows a number of bytes.

    >>> show(1_500_000_000), show(200)
    ('1.50 GB', '200 B')
    """
    for unit in ("TB", "GB", "MB", "KB"):
        if n_bytes >= _UNITS[unit]:
            return f"{n_bytes / _UNITS[unit]:.2f} {unit}"
    return f"{n_bytes} B"
