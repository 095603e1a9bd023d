"""What is in memory at the peak of a training step, for a run that ran out of memory."""

from typing import Any

import jax

from tekoa.core import trees
from tekoa.estimator.replay import origin
from tekoa.loop.train import TrainLoop
from tekoa.sharding import memory

_N_SHOWN = 10


def explain(loop: TrainLoop) -> list[str]:
    """Describes the memory of a step: the state, and the arrays that live at the peak.

    The step is traced, not run. The compiler fuses and reorders operations, so that it usually
    needs less.

    Args:
        loop: The loop of the run.
    """
    training, _, options = loop.parts
    state, batch = loop.state, loop.peek_batch()
    held = memory.held_at_peak(training.make_step(options), (state, batch))
    total = sum(entry.n_bytes for entry in held)
    parts = {
        "parameters": state.params,
        "optimizer state": state.opt_state,
        "other variables": state.variables,
        "average": state.average,
        "batch": batch,
    }
    sizes = ", ".join(f"{name} {_size(n)}" for name, tree in parts.items() if (n := _n_bytes(tree)))
    lines = [f"Before a step: {sizes}."]
    lines.append(f"During a step, at the peak, about {_size(total)} more:")
    lines += [f"  {_size(entry.n_bytes):>9}  {_describe(entry)}" for entry in held[:_N_SHOWN]]
    rest = held[_N_SHOWN:]
    if rest:
        lines.append(f"  {_size(sum(e.n_bytes for e in rest)):>9}  {len(rest)} smaller arrays")
    lines.append(
        "What helps: smaller batches, --accumulate=N (divides what grows with the batch by N), "
        "--precision=bf16, or jax.checkpoint around the layers above."
    )
    return lines


def _describe(entry: memory.Held) -> str:
    equation = entry.equation
    file, line = origin.user_line(equation.source_info)
    layer = origin.layer_of(str(equation.source_info.name_stack))
    what = "inside" if entry.aval is None else f"{entry.aval.str_short()} of"
    at = f" at {file}:{line}" if file else ""
    return f"{what} `{equation.primitive.name}`{at}{f', in {layer}' if layer else ''}"


def _n_bytes(tree: Any) -> int:
    return trees.n_bytes(tree) if jax.tree.leaves(tree) else 0


def _size(n_bytes: float) -> str:
    """Formats a number of bytes.

    >>> _size(512), _size(1.5e6)
    ('512 B', '1.5 MB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= size:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes:.0f} B"
