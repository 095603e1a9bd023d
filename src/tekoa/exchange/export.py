"""`tekoa.export`: trained weights, or a trained model as a program, for other libraries."""

import os
import pathlib
from collections.abc import Callable
from typing import Any, Literal, cast, get_args

from tekoa.bridges import any_model
from tekoa.core import files, messages
from tekoa.core.state import TrainState
from tekoa.core.trees import PyTree
from tekoa.exchange import card, program, trained, weights_file
from tekoa.exchange import names as names_lib

Format = Literal["safetensors", "numpy", "orbax", "stablehlo", "onnx"]
SUFFIXES: dict[str, Format] = {
    ".safetensors": "safetensors",
    ".npz": "numpy",
    ".orbax": "orbax",
    ".stablehlo": "stablehlo",
    ".onnx": "onnx",
}
# Formats that contain the computation, not only the weights.
PROGRAMS = ("stablehlo", "onnx")


def export(
    source: str | os.PathLike[str] | TrainState | trained.HasState,
    out: str | os.PathLike[str],
    *,
    to: Format | None = None,
    names: str | names_lib.Rules | None = None,
    model: Any = None,
    inputs: Any = None,
    apply: Callable[..., Any] | None = None,
    batch_size: int | None = None,
    step: int | None = None,
    average: bool = True,
) -> pathlib.Path:
    """Writes a trained model for other libraries, with a model card in JSON beside it.

    Args:
        source: The directory of a run, of its checkpoints, or of a single one; or a state, or a
            loop or the result of `fit` that has one.
        out: The file to write; for Orbax, a new directory.
        to: "safetensors", "numpy" or "orbax" for the weights; "stablehlo" or "onnx" for a program
            that maps inputs to outputs. By default the ending of `out` decides.
        names: How weights are named: "torch" (the default of safetensors) for the names and the
            order of axes of PyTorch's layers, "native" for those of the model, or rules to apply
            before those of "torch": pattern to name, or to name and axes.
        model: The model, as passed to `fit` or `TrainLoop`; needed for a program.
        inputs: Sample inputs of the model, an array or a tuple; needed for a program.
        apply: The function that runs the model, if `model` does not include it.
        batch_size: Rows in a call of the program; any number by default.
        step: The step to export; the newest valid one by default.
        average: Whether to export the moving average of the parameters if there is one.

    Returns:
        The path that was written.

    Raises:
        ValueError: If the format is unknown, or two weights get the same name.
        TypeError: If the source is none of these.
        ExportError: If the model cannot be written as a program.
        errors.StoreError: If there is no such checkpoint.
    """
    path = files.local_path(out)
    chosen = check_format(path, to)
    weights = trained.read(source, step=step, average=average)
    if chosen not in PROGRAMS:
        return write_weights(path, chosen, weights, names)
    if model is None or inputs is None:
        raise ValueError(f"A program of format {chosen!r} needs model= and sample inputs=.")
    fns = any_model.as_model_fns(model, apply)
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    infer = program.inference_fn(fns, weights, inputs)
    return write_program(path, chosen, weights, infer, inputs, batch_size=batch_size)


def load_weights(
    path: str | os.PathLike[str],
    params: PyTree,
    variables: PyTree | None = None,
    *,
    names: str | names_lib.Rules | None = None,
) -> Any:
    """Returns the weights of a safetensors file in the structure of a model's own.

    Args:
        path: The file.
        params: The model's parameters, or their shapes.
        variables: Its other collections, if the file has them.
        names: How the file names the weights, as for `export`; by default, as PyTorch's layers or
            as the model itself. A common prefix is ignored.

    Returns:
        The parameters; with `variables`, a pair of parameters and variables.

    Raises:
        errors.MismatchError: If an array is missing, unexpected, or has another shape or dtype.
        errors.StoreError: If the file cannot be read.
    """
    target = {names_lib.PARAMS: params, names_lib.VARIABLES: variables or {}}
    is_label = isinstance(names, str)
    namings = [names_lib.naming_of(names)] if is_label else names_lib.namings_for(names)
    stored, _ = weights_file.read_safetensors(files.local_path(path), target, namings)
    loaded = trained.like(target, stored, str(path))
    if variables is None:
        return loaded[names_lib.PARAMS]
    return loaded[names_lib.PARAMS], loaded[names_lib.VARIABLES]


def check_format(path: pathlib.Path, to: str | None) -> Format:
    """Returns the format to write: the requested one, or that of the file's ending.

    Raises:
        ValueError: If neither names a format.
    """
    chosen = SUFFIXES.get(path.suffix) if to is None else to
    if chosen is None:
        raise ValueError(
            f"{str(path)!r} does not tell the format: use one of the endings "
            f"{', '.join(SUFFIXES)}, or to=."
        )
    if chosen not in get_args(Format):
        hint = messages.did_you_mean(chosen, get_args(Format))
        raise ValueError(f"to must be one of {', '.join(get_args(Format))}, got {to!r}.{hint}")
    return cast(Format, chosen)


def write_weights(
    path: pathlib.Path,
    to: Format,
    weights: trained.Trained,
    names: str | names_lib.Rules | None = None,
) -> pathlib.Path:
    """Writes weights and their card; arguments as for `export`."""
    default = "torch" if to == "safetensors" else "native"
    naming = names_lib.naming_of(default if names is None else names)
    if to == "orbax":
        if names not in (None, "native"):
            raise ValueError("An Orbax checkpoint keeps the model's own names: omit names.")
        weights_file.write_orbax(path, weights.weights)
    else:
        write = {
            "safetensors": weights_file.write_safetensors,
            "numpy": weights_file.write_numpy,
        }[to]
        write(path, weights.weights, naming)
    arrays = card.arrays(names_lib.to_named(weights.weights, naming))
    card.write(path, weights, format=to, names=naming.label, arrays=arrays)
    return path


def write_program(
    path: pathlib.Path,
    to: Format,
    weights: trained.Trained,
    infer: Callable[..., Any],
    inputs: tuple[Any, ...],
    *,
    batch_size: int | None = None,
) -> pathlib.Path:
    """Writes a function of the inputs and its card; arguments as for `export`."""
    write = {"stablehlo": program.write_stablehlo, "onnx": program.write_onnx}[to]
    outputs = write(path, infer, inputs, batch_size)
    n_rows = "batch" if batch_size is None else batch_size
    card.write(
        path,
        weights,
        format=to,
        inputs=card.describe("input", program.input_shapes(inputs, n_rows)),
        outputs=card.describe("output", outputs),
    )
    return path
