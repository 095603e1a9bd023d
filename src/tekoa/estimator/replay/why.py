"""`tekoa why` explains why a run stopped at NaN or Inf, or skipped steps.

It trains the bad step again and finds the first operation whose result is not finite, with the line
of the model that called it; the gradient that went first; the examples of the batch that cause it;
and whether the step would be good in float32, without those examples, or at half the learning rate.
If no step is bad, it looks for the checkpoint at which the loss rose most. The run does not change.

Flags:
  --step=N     look at this step; by default the first bad one is found
  --memory     show what is in memory at the peak of a step, for a run that ran out of memory
  --page=FILE  write the page of the run, as `tekoa page` does, with this diagnosis

Exit codes: 0 if a cause was found, 1 if nothing is wrong.

Example: tekoa why runs/mnist
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tekoa.core import trees
from tekoa.core.state import TrainState
from tekoa.estimator.replay import arguments as arguments_lib
from tekoa.estimator.replay import origin as origins
from tekoa.estimator.replay import peak, spikes
from tekoa.estimator.replay.origin import Origin
from tekoa.estimator.replay.segment import MakeLoop, Replayer, ReplayError, has_data_ended
from tekoa.estimator.report import page
from tekoa.loop.train import TrainLoop
from tekoa.store.formats import step as steps
from tekoa.store.read import load

USAGE = "tekoa why RUN [--step=N] [--memory] [--page=FILE]"
# After the last checkpoint, a run that stopped at NaN fails within one step.
_N_STEPS_AFTER = 3
_N_STEPS_AT_HALF_RATE = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Why a step is bad.

    Attributes:
        step: The first bad step; None if there is none.
        origin: Where the first NaN or Inf began.
        input_name: The leaf of the state or batch that was not finite before the step, if so.
        loss: The loss of the step; None for a model file in the long form.
        gradients: The parameters whose gradients are not finite, in the order of the state.
        rows: The rows of the batch that cause it alone; empty if none does, or all do.
        row_text: Describes the first of these rows.
        findings: Further sentences, such as what helps.
    """

    step: int | None
    origin: Origin | None = None
    input_name: str = ""
    loss: float | None = None
    gradients: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    row_text: str = ""
    findings: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Returns the diagnosis as text."""
        lines = list(self.findings)
        if self.step is not None:
            loss = "" if self.loss is None else f": the loss is {self.loss:.6g}"
            lines = [f"Step {self.step} is not finite{loss}.", *self._text()]
        return "\n".join(lines) or "All steps are finite."

    def _text(self) -> list[str]:
        lines = []
        where = self.origin
        if self.input_name:
            lines.append(f"It began before the step: {self.input_name} is not finite.")
        elif where is not None:
            is_loss_good = self.loss is None or np.isfinite(self.loss)
            is_gradient = where.is_backward or is_loss_good
            kind = "the gradient of " if is_gradient and self.gradients else ""
            at = f" at {where.file}:{where.line}" if where.file else ""
            layer = f", in {where.layer}" if where.layer else ""
            lines.append(f"It began in {kind}`{where.operation}`{at}{layer}.")
            lines += [f"  operand  {text}" for text in where.operands]
            lines.append(f"  result   {where.result}")
        if self.gradients:
            first, n = self.gradients[0], len(self.gradients)
            lines.append(f"Gradients that are not finite: {n}, the first is that of {first}.")
        if self.rows:
            listed = ", ".join(map(str, self.rows[:10]))
            lines.append(f"Rows of the batch that cause it, counted from 0: {listed}.")
            lines.append(f"  {self.row_text}")
        return [*lines, *self.findings]


def why(
    directory: str | os.PathLike[str],
    make_loop: MakeLoop | None = None,
    *,
    step: int | None = None,
    memory: bool = False,
) -> Diagnosis:
    """Explains the first step of a run that is not finite. The run does not change.

    Args:
        directory: The directory of the run.
        make_loop: As for `replay`.
        step: The step to explain; by default the first bad one is found.
        memory: Whether to explain the memory of a step instead, for a run that ran out of it.

    Raises:
        ReplayError: If the step cannot be replayed.
    """
    replayer = Replayer(directory, make_loop)
    with replayer.noticing_removals():
        return _explain(replayer, step, memory)


def _explain(replayer: Replayer, step: int | None, memory: bool) -> Diagnosis:
    if memory:
        # Where it began: at the end there may be no more data.
        first = 0 if replayer.starts_from_scratch else min(replayer.stored, default=0)
        loop = replayer.loop_at(first)
        return Diagnosis(step=None, findings=tuple(peak.explain(loop)))
    if step is not None:
        loop = replayer.loop_at(step - 1)
        return _diagnose(replayer, loop)
    loop = _find_bad(replayer)
    if loop is None:
        findings = spikes.explain(replayer) or spikes.explain_start(replayer)
        return Diagnosis(step=None, findings=tuple(findings))
    return _diagnose(replayer, loop)


def run_why(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit code."""
    parser = arguments_lib.Arguments("why", "RUN")
    parser.add_argument("--step", type=arguments_lib.step)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--page", metavar="FILE")
    parsed = parser.parse(arguments)
    if parsed.step == 0:
        raise ReplayError("Step 0 is the initial state: steps are counted from 1.")
    if parsed.step is not None and parsed.memory:
        raise ReplayError("All steps need the same memory: leave out --step or --memory.")
    replayer = Replayer(parsed.RUN)
    newest = max(replayer.stored, default=0)
    arguments_lib.print_differences(replayer.directory, replayer.differences(newest))
    with arguments_lib.compiled_once():
        result = why(parsed.RUN, step=parsed.step, memory=parsed.memory)
    print(result)
    if parsed.page is not None:
        print(f"Wrote {page.write_page(parsed.RUN, parsed.page, diagnosis=str(result))}.")
    # Of a step that was named, the only finding may be that it is finite.
    has_findings = bool(result.findings) and parsed.step is None
    return 0 if result.step is not None or has_findings else 1


def _find_bad(replayer: Replayer) -> TrainLoop | None:
    """Returns the loop before the first bad step; None if all steps are good."""
    replayer.check_stored()
    stored = sorted(replayer.stored)
    for before, after in zip([0, *stored], stored, strict=False):
        if not _is_marked_bad(replayer, after):
            continue
        start = replayer.nearest(max(before - (before == after), 0))
        return _step_to_bad(replayer.loop_at(start), after - start)
    return _step_to_bad(replayer.loop_at(stored[-1]), _N_STEPS_AFTER)


def _is_marked_bad(replayer: Replayer, step: int) -> bool:
    """Whether a checkpoint counts bad steps, or contains parameters that are not finite."""
    opened = steps.open_step(replayer.stored[step])
    items = [name for name in ("health", "model_params") if name in opened.index.items]
    loaded = load.load_step(opened, items=items)
    n_bad = np.max(trees.to_numpy(loaded.get("health", {}).get("n_bad", 0)))
    params = jax.tree.leaves(loaded.get("model_params", {}))
    return bool(n_bad) or not all(np.isfinite(x.astype(np.float64)).all() for x in params)


def _step_to_bad(loop: TrainLoop, n_steps: int) -> TrainLoop | None:
    """Advances a loop until the next step is bad; None if none of the next steps is."""
    evaluate = _Evaluation(loop)
    for _ in range(n_steps):
        if has_data_ended(loop):
            return None
        if evaluate.is_bad(loop.state, loop.peek_batch()):
            return loop
        loop.next_step()
    return None


class _Evaluation:
    """Evaluates the step of a loop, and whether it is bad."""

    def __init__(self, loop: TrainLoop, **changes: Any):
        self.step = loop.pure_step(**{"on_nan": "ignore", **changes})
        # A model file in the long form keeps the value of its loss to itself.
        self.parts = ["[1].loss", "[1].grads", "[0].params"]
        if not (has_loss := "loss" in loop.parts[0].reported):
            self.parts.remove("[1].loss")

        @jax.jit
        def evaluate(state: TrainState, batch: Any) -> tuple[Any, Any, list[jax.Array]]:
            after, output = self.step(state, batch)
            checked = [output.loss if has_loss else (), output.grads, after.params]
            are_finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(checked)]
            is_undone = _is_undone(state, after)
            return after, output, [is_finite | is_undone for is_finite in are_finite]

        self.evaluate = evaluate

    def is_bad(self, state: TrainState, batch: Any) -> bool:
        return not all(bool(x) for x in self.evaluate(state, batch)[2])


def _is_undone(before: TrainState, after: TrainState) -> Any:
    """Whether gradients overflowed in float16, so that the step only halved its loss scale."""
    if before.loss_scale is None or after.loss_scale is None:
        return False
    return after.loss_scale.n_overflows > before.loss_scale.n_overflows


def _diagnose(replayer: Replayer, loop: TrainLoop) -> Diagnosis:
    state, batch, evaluation = loop.state, loop.peek_batch(), _Evaluation(loop)
    after, output, _ = evaluation.evaluate(state, batch)
    where = None
    for part in evaluation.parts:
        where = where or origins.find_origin(
            evaluation.step, (state, batch), lambda path, part=part: path.startswith(part)
        )
    if where is None:
        return Diagnosis(step=None, findings=(f"Step {loop.step + 1} is finite.",))
    gradients = trees.named_leaves(output.grads)
    rows = _bad_rows(lambda rows: evaluation.is_bad(state, rows), batch)
    n_rows = _n_rows(batch)
    findings = list(_remedies(replayer, loop, batch, rows))
    if len(rows) == n_rows and n_rows > 1:
        findings.insert(0, "Every row of the batch causes it: the data is not the cause.")
        rows = []
    if _is_undone(state, after):
        findings.append("The run skipped this step and halved the scale of its loss, as it should.")
    return Diagnosis(
        step=loop.step + 1,
        origin=where,
        input_name=_input_name(where, state, batch),
        loss=float(output.loss) if "[1].loss" in evaluation.parts else None,
        gradients=tuple("/".join(n) for n, x in gradients.items() if not jnp.isfinite(x).all()),
        rows=tuple(rows),
        row_text=_row_text(batch, rows[0]) if rows else "",
        findings=tuple(findings),
    )


def _input_name(where: Origin, state: TrainState, batch: Any) -> str:
    """Returns which array was not finite before the step."""
    if where.argument is None:
        return ""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path((state, batch))]
    kind, *rest = paths[where.argument]
    name = jax.tree_util.keystr(tuple(rest), simple=True, separator="/")
    return f"{'the state' if kind.idx == 0 else 'the batch'}, {name or 'its only array'}"


def _n_rows(batch: Any) -> int:
    sizes = {np.shape(x)[0] if np.ndim(x) else 0 for x in jax.tree.leaves(batch)}
    return sizes.pop() if len(sizes) == 1 else 0


def _bad_rows(is_bad: Callable[[Any], bool], batch: Any) -> list[int]:
    """Returns the rows that cause it alone, by halving; the others are replaced by one of them."""
    n_rows = _n_rows(batch)

    def search(rows: list[int]) -> list[int]:
        chosen = np.array([row if row in rows else rows[0] for row in range(n_rows)])
        if not is_bad(jax.tree.map(lambda x: np.asarray(x)[chosen], batch)):
            return []
        if len(rows) == 1:
            return rows
        half = len(rows) // 2
        return search(rows[:half]) + search(rows[half:])

    return search(list(range(n_rows))) if n_rows else []


def _row_text(batch: Any, row: int) -> str:
    """Describes one row of the batch."""
    named = trees.named_leaves(batch)
    texts = (
        f"{'/'.join(name) or 'batch'} {origins.describe_array(np.asarray(x)[row])}"
        for name, x in named.items()
    )
    return f"row {row}: " + "; ".join(texts)


def _remedies(replayer: Replayer, loop: TrainLoop, batch: Any, rows: list[int]) -> Sequence[str]:
    """Tries what might help and returns a sentence for each try."""
    lines = []
    state, n_rows = loop.state, _n_rows(batch)
    if loop.options.precision != "float32":
        is_bad = _Evaluation(loop, precision="float32").is_bad(state, batch)
        lines.append(f"In float32 the step is {'bad too' if is_bad else 'finite'}.")
    if rows and len(rows) < n_rows:
        good = next(row for row in range(n_rows) if row not in rows)
        row_numbers = np.array([good if row in rows else row for row in range(n_rows)])
        without = jax.tree.map(lambda x: np.asarray(x)[row_numbers], batch)
        is_bad = _Evaluation(loop).is_bad(state, without)
        lines.append(f"Without these rows the step is {'bad too' if is_bad else 'finite'}.")
    elif loop.step:
        is_bad = _is_bad_at_half_rate(replayer, loop.step + 1)
        if is_bad is not None:
            lines.append(
                f"At half the learning rate the step is {'bad too' if is_bad else 'finite'}."
            )
    return lines


def _is_bad_at_half_rate(replayer: Replayer, bad_step: int) -> bool | None:
    """Trains up to the bad step with updates of half the size; None if that takes too long."""
    start = replayer.nearest(max(bad_step - 2, 0))
    if bad_step - start > _N_STEPS_AT_HALF_RATE:
        return None
    loop = replayer.loop_at(start)
    evaluation, state = _Evaluation(loop), loop.state
    for step in range(start + 1, bad_step + 1):
        batch = loop.peek_batch()
        if evaluation.is_bad(state, batch):
            return True
        after, _, _ = evaluation.evaluate(state, batch)
        halved = jax.tree.map(lambda old, new: (old + new) / 2, state.params, after.params)
        state = after.replace(params=halved)
        if step < bad_step:
            loop.next_step()
    return False
