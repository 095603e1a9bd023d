"""`tekoa plan`: the memory that training needs on each device, computed from shapes.

Nothing is allocated. The memory of activations is that of the compiled step if this machine
has enough devices for the mesh, else an estimate from the traced step.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from tekoa.core import messages, trees
from tekoa.core.state import TrainState
from tekoa.estimator.cli.flags import RunConfig, UsageError
from tekoa.estimator.model_file.program import program_of
from tekoa.estimator.run import layout as layout_lib
from tekoa.estimator.run import run as runs
from tekoa.loop.task import ChoosesOptimizer, Options, Training
from tekoa.sharding import memory as memory_lib
from tekoa.sharding import mesh
from tekoa.sharding import specs as specs_lib
from tekoa.sharding.layout import Layout
from tekoa.sharding.placement import Placement, with_sharding

_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The memory that training needs, by part.

    Attributes:
        layout: How the run is split over devices.
        form: Shapes of the state.
        specs: Specs of the state.
        n_rows: Rows of a batch.
        parts: Bytes in total (None if unknown) and per device, by name.
        is_compiled: Whether the activations are those of the compiled step.
    """

    layout: Layout
    form: TrainState
    specs: TrainState
    n_rows: int
    parts: dict[str, tuple[int | None, int]]
    is_compiled: bool

    @property
    def n_bytes(self) -> int:
        """Bytes per device."""
        return sum(n for _, n in self.parts.values())


def run_plan(config: RunConfig) -> int:
    """Prints the memory that training needs and returns the exit code."""
    run = runs.open_run(config)
    config = run.config
    program = program_of(_on_one_device(run), "train")
    limit = parse_bytes(config.device_memory)
    options = Options(accumulate=config.accumulate, ema=config.ema, precision=config.precision)
    layout = _make_layout(run)
    parts = program.train_parts((), layout)
    training, sample = parts.training, program.sample("train")
    if isinstance(training, ChoosesOptimizer):
        training.resolve_optimizer(sample, config.max_train_steps)
    batch = _batch_shapes(sample, config.train_batch_size)
    plan = make_plan(training, batch, parts.layout or layout, options)
    print("\n".join(lines(plan)))
    if limit is None or plan.n_bytes <= limit:
        return 0
    raise UsageError(
        f"Out of memory: a device needs {bytes_text(plan.n_bytes)} but has {bytes_text(limit)}. "
        + advice(plan, options, limit)
    )


def make_plan(training: Training, batch: Any, layout: Layout, options: Options) -> Plan:
    """Computes the memory that training needs on each device of a layout.

    Args:
        training: The functions that create and update the state.
        batch: Shapes of a batch.
        layout: How the run is split; the mesh may have more devices than this machine.
        options: Options of the step.

    Raises:
        LayoutError: If a rule does not fit.
        UsageError: If the batch cannot be split evenly.
    """
    n_rows = jax.tree.leaves(batch)[0].shape[0]
    if n_rows % (layout.n_row_parts * options.accumulate):
        raise UsageError(
            f"A batch of {n_rows} rows cannot be split into {layout.n_row_parts} equal parts on "
            f"the mesh {layout}, each of {options.accumulate} microbatches (--accumulate)."
        )
    rng = jax.eval_shape(lambda: jax.random.key(0))
    form = jax.eval_shape(functools.partial(training.init, options=options), rng, batch)
    specs = layout.state_specs(form, training.axes(rng, batch))
    rows = jax.tree.map(lambda _: layout.row_spec, batch)
    count = functools.partial(_count_bytes, layout=layout)
    gradients = count(form.params, specs.params)
    is_compiled = isinstance(layout.mesh, jax.sharding.Mesh)
    peak = _compiled_peak if is_compiled else _estimated_peak
    n_activations = peak(training, (form, batch), (specs, rows), layout, options)
    if is_compiled:  # Its temporaries include the gradients.
        n_activations = max(0, n_activations - gradients[1])
    rest = (form.variables, form.carry, form.sums), (specs.variables, specs.carry, specs.sums)
    parts = {
        "parameters": gradients,
        "optimizer state": count(form.opt_state, specs.opt_state),
        "moving average": count(form.average, specs.average),
        "other state": count(*rest),
        "batch": count(batch, rows),
        "gradients": gradients,
        "activations": (None, n_activations),
    }
    return Plan(
        layout=layout,
        form=form,
        specs=specs,
        n_rows=n_rows,
        parts={name: sizes for name, sizes in parts.items() if sizes[1]},
        is_compiled=is_compiled,
    )


def _compiled_peak(
    training: Training, args: Any, specs: Any, layout: Layout, options: Options
) -> int:
    """Compiles the step and returns the bytes of its temporaries on one device."""
    step = Placement(layout).traced(training.make_step(options))
    shardings = layout.shardings(specs)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings[0], None))
    shapes = jax.tree.map(with_sharding, args, shardings)
    memory = jitted.lower(*shapes).compile().memory_analysis()
    if memory is None:
        raise UsageError(f"The backend {jax.default_backend()!r} has no memory analysis.")
    return int(memory.temp_size_in_bytes)


def _estimated_peak(
    training: Training, args: Any, specs: Any, layout: Layout, options: Options
) -> int:
    """Traces the step and estimates the bytes of its temporaries on one device."""
    step = Placement(layout).traced(training.make_step(options, keep_grads=True))

    def gradients(state: TrainState, batch: Any) -> Any:
        new_state, output = step(state, batch)
        # If the step returns no gradients, the update is counted as well.
        return (output.loss, output.grads) if output.grads is not None else (new_state, output)

    return memory_lib.peak_bytes(gradients, args, specs, layout.mesh.shape)


def _count_bytes(tree: Any, specs: Any, *, layout: Layout) -> tuple[int, int]:
    """Returns the bytes of a tree, in total and on one device."""
    per_device = sum(
        trees.n_bytes(x) // specs_lib.n_parts(spec, layout.mesh.shape)
        for x, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True)
    )
    return trees.n_bytes(tree), per_device


def _make_layout(run: runs.Run) -> Layout:
    """Creates the layout, on an abstract mesh if this machine has too few devices."""
    sizes = layout_lib.sizes_of(run.config)
    fixed = math.prod(size for size in sizes.values() if size is not None)
    if fixed <= len(jax.devices()):
        return layout_lib.make_layout(run, mesh.make_mesh(**sizes))
    full = mesh.fill_sizes(sizes, fixed)
    types = (jax.sharding.AxisType.Auto,) * len(full)
    abstract = jax.sharding.AbstractMesh(tuple(full.values()), tuple(full), axis_types=types)
    return layout_lib.make_layout(run, abstract)


def _on_one_device(run: runs.Run) -> runs.Run:
    """Returns the run with one device and batches of one row, enough to read a sample."""
    single = {"mesh": "data=1,fsdp=1,model=1", "num_partitions": 1, "model_parallel_submesh": ()}
    rules = {"sharding_rules": None, "optimizer_rules": None, "train_batch_size": 1}
    return dataclasses.replace(run, config=dataclasses.replace(run.config, **single, **rules))


def _batch_shapes(sample: Any, n_rows: int) -> Any:
    """Returns the shapes of a batch like the sample, with another number of rows."""

    def resize(x: Any) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)
        return jax.ShapeDtypeStruct((n_rows, *np.shape(x)[1:]), dtype)

    return jax.tree.map(resize, sample)


def lines(plan: Plan) -> Iterable[str]:
    """Formats a plan as a table."""
    n_parts = plan.layout.n_row_parts
    split = f", split into {n_parts} parts" if n_parts > 1 else ""
    yield f"Mesh: {plan.layout}. Batch: {plan.n_rows} rows{split}."
    yield ""
    yield f"{'':24} {'total':>10} {'per device':>12}"
    for name, (total, per_device) in plan.parts.items():
        text = "" if total is None else bytes_text(total)
        yield f"{name:24} {text:>10} {bytes_text(per_device):>12}"
    yield f"{'sum':24} {'':>10} {bytes_text(plan.n_bytes):>12}"
    source = "taken from the compiled" if plan.is_compiled else "estimated from the traced"
    yield f"Activation memory is {source} step."
    yield ""
    yield "Parameters and how they are split:"
    names = [re.sub(r"\d+", "*", "/".join(name)) for name in trees.leaf_names(plan.form.params)]
    arrays = [messages.array_text(x.dtype, x.shape) for x in jax.tree.leaves(plan.form.params)]
    specs = map(_spec_text, jax.tree.leaves(plan.specs.params))
    counts = collections.Counter(zip(names, arrays, specs, strict=True))
    width = max(len(name) for name, *_ in counts)
    for (name, array, spec), n in counts.items():
        yield f"  {name:{width}} {array:28} {spec}{f'  ({n} times)' if n > 1 else ''}"


def _spec_text(spec: jax.P) -> str:
    axes = ["+".join(e) if isinstance(e, tuple) else e or "-" for e in spec]
    return ", ".join(axes) if any(axis != "-" for axis in axes) else "not split"


def advice(plan: Plan, options: Options, limit: int) -> str:
    """Suggests how to make training fit into the memory of a device."""
    n_activations = plan.parts.get("activations", (None, 0))[1]
    fixed = plan.n_bytes - n_activations
    if fixed >= limit:
        return (
            f"State and gradients alone need {bytes_text(fixed)}. Split them over more devices "
            "(--mesh, --optimizer_rules)."
        )
    n = options.accumulate
    while n_activations * options.accumulate / n > limit - fixed:
        n *= 2
    if plan.n_rows % (n * plan.layout.n_row_parts):
        return "Use a smaller --train_batch_size or a larger --mesh."
    n_bytes = fixed + n_activations * options.accumulate // n
    return f"--accumulate={n} would need about {bytes_text(n_bytes)}."


def parse_bytes(text: str | None) -> int | None:
    """Parses a size such as 16GB or 80GiB.

    Raises:
        UsageError: If the text is not a size.

    >>> parse_bytes('1.5GB')
    1500000000
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([A-Za-z]*)\s*", text)
    number, unit = match.groups() if match else ("", "")
    if not number or unit.upper() not in ("", *_UNITS):
        raise UsageError(f"--device_memory must be a size such as 16GB or 80GiB, got {text!r}.")
    return int(float(number) * _UNITS.get(unit.upper(), 1))


def bytes_text(n_bytes: int) -> str:
    """Formats a number of bytes.

    >>> bytes_text(1_500_000_000), bytes_text(200)
    ('1.50 GB', '200 B')
    """
    for unit in ("TB", "GB", "MB", "KB"):
        if n_bytes >= _UNITS[unit]:
            return f"{n_bytes / _UNITS[unit]:.2f} {unit}"
    return f"{n_bytes} B"
