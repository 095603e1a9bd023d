"""A trained model as one program: StableHLO by `jax.export`, or ONNX."""

import functools
import logging
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from tekoa import _extras
from tekoa.core import batch as batch_lib
from tekoa.core import messages, objective, trees
from tekoa.core.model import ModelFns
from tekoa.core.trees import PyTree
from tekoa.exchange import trained
from tekoa.exchange.trained import Trained
from tekoa.store.commit import durable

# A program runs on each of these; it contains the code for all of them.
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


class ExportError(ValueError):
    """A model that cannot be written as a program."""

    exit_code = 2


def inference_fn(
    model: ModelFns, source: str | os.PathLike[str] | Trained, inputs: tuple[Any, ...]
) -> Callable[..., Any]:
    """Returns `f(*inputs) -> outputs` with the weights of a trained model.

    Dropout is off, and averages are those of training. A recurrent model starts from a new carry
    at every call.

    Args:
        model: The model.
        source: The weights, or the directory of a checkpoint.
        inputs: Sample inputs.

    Raises:
        errors.MismatchError: If the weights do not fit the model.
        ExportError: If the rows of a new carry differ.
    """
    weights = source if isinstance(source, Trained) else trained.read(source)
    weights = trained.for_model(weights, model, inputs, what="The checkpoint")
    carry = _row_of_carry(model, inputs)

    def infer(*inputs: Any) -> Any:
        # Models may index their weights by the inputs, which numpy arrays do not support.
        params, variables = jax.tree.map(jnp.asarray, (weights.params, dict(weights.variables)))
        if carry is not None:
            n_rows = batch_lib.n_rows(inputs)
            variables[objective.CARRY] = jax.tree.map(
                lambda x: jnp.broadcast_to(x, (n_rows, *x.shape[1:])), carry
            )
        outputs, _ = model.apply(params, variables, inputs, rng=jax.random.key(0), train=False)
        return outputs

    return infer


def _row_of_carry(model: ModelFns, inputs: tuple[Any, ...]) -> PyTree:
    """Returns one row of a new carry, if the model has one: a program cannot initialise it."""
    carry = jax.jit(functools.partial(objective.new_carry, model))(jax.random.key(0), inputs)
    if carry is None:
        return None
    n_rows = batch_lib.n_rows(inputs)
    for name, leaf in trees.flatten_named(carry).items():
        if leaf.shape[:1] != (n_rows,) or not bool((leaf == leaf[:1]).all()):
            raise ExportError(
                f"The model cannot be exported: its new carry {name!r}, of shape {leaf.shape}, is "
                "not the same for every row."
            )
    return jax.tree.map(lambda x: np.asarray(x[:1]), carry)


def input_shapes(inputs: tuple[Any, ...], n_rows: Any) -> tuple[Any, ...]:
    """Returns the shapes of inputs, with another number of rows.

    Args:
        inputs: Sample inputs. Arrays without the rows of a batch keep their shape.
        n_rows: A number, or a symbolic dimension.
    """
    sample_rows = batch_lib.n_rows(inputs)

    def shape_of(x: Any) -> jax.ShapeDtypeStruct:
        shape = jnp.shape(x)
        if shape and shape[0] == sample_rows:
            shape = (n_rows, *shape[1:])
        return jax.ShapeDtypeStruct(shape, jnp.result_type(x))

    return jax.tree.map(shape_of, inputs)


def write_stablehlo(
    path: pathlib.Path, infer: Callable[..., Any], inputs: tuple[Any, ...], batch_size: int | None
) -> Any:
    """Writes a function as a serialized `jax.export.Exported`.

    `jax.export.deserialize(data).call(*inputs)` runs it, without Tekoa and the model's code.

    Args:
        path: The file.
        infer: The function.
        inputs: Sample inputs.
        batch_size: Rows per call; None for any number.

    Returns:
        The shapes of the outputs.

    Raises:
        ExportError: If JAX cannot trace the function.
    """
    # What `serialize` needs, and JAX does not install.
    _extras.require("flatbuffers", extra="stablehlo", what=f"Writing {path}")
    make = jax.export.export(jax.jit(infer), platforms=PLATFORMS)
    exported = _traced(lambda: make(*input_shapes(inputs, _n_rows(batch_size))), batch_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.replace(path, bytes(exported.serialize()))
    return jax.tree.unflatten(exported.out_tree, exported.out_avals)


def write_onnx(
    path: pathlib.Path, infer: Callable[..., Any], inputs: tuple[Any, ...], batch_size: int | None
) -> Any:
    """Writes a function as an ONNX model, by jax2onnx; arguments as for `write_stablehlo`.

    Returns:
        The shapes of the outputs.

    Raises:
        ExportError: If jax2onnx does not support an operation of the model.
    """
    jax2onnx = _extras.require("jax2onnx", extra="onnx", what=f"Writing {path}")
    messages.quiet_log("onnx_ir", logging.ERROR)  # It warns of shapes without types.
    shapes = input_shapes(inputs, _n_rows(batch_size))
    leaves, treedef = jax.tree.flatten(shapes)
    outputs = _traced(lambda: jax.eval_shape(infer, *shapes), batch_size)
    n_outputs = len(jax.tree.leaves(outputs))

    def infer_flat(*arrays: Any) -> Any:
        return jax.tree.leaves(infer(*jax.tree.unflatten(treedef, arrays)))

    def convert() -> Any:
        # Traced here: while jax2onnx traces, it replaces functions of JAX and Flax by its own,
        # which do not accept all arguments of the originals.
        traced = jax.make_jaxpr(infer_flat)(*leaves)
        # Without what no output needs, such as the keys of dropout, which ONNX does not have.
        jaxpr, _ = dce_jaxpr(traced.jaxpr, [True] * n_outputs, instantiate=True)
        traced = ClosedJaxpr(jaxpr, traced.consts)
        return jax2onnx.to_onnx(
            jaxpr_as_fun(traced),
            inputs=leaves,
            input_names=[f"input_{i}" for i in range(len(leaves))],
            output_names=[f"output_{i}" for i in range(n_outputs)],
        )

    model = _traced(convert, batch_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.replace(path, model.SerializeToString())
    return outputs


def _n_rows(batch_size: int | None) -> Any:
    return jax.export.symbolic_shape("batch")[0] if batch_size is None else batch_size


def _traced(work: Callable[[], Any], batch_size: int | None) -> Any:
    """Traces a model; whatever its code raises becomes one message."""
    try:
        return work()
    except Exception as error:
        advice = ""
        if batch_size is None:
            advice = " If the model needs a fixed number of rows, set the batch size of the export."
        first_line = str(error).strip().partition("\n")[0][:300]
        raise ExportError(
            f"The model cannot be exported: {type(error).__name__}: {first_line}.{advice}"
        ) from error
