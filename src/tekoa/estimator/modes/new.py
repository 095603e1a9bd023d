"""`tekoa new`: writes a model file to start from."""

import pathlib

from tekoa.core import files
from tekoa.estimator import starters
from tekoa.estimator.cli.flags import RunConfig, UsageError

_OWN_NAME = "my_model"


def run_new(file: str, config: RunConfig) -> int:
    """Writes a model file that trains as it is, and returns the exit code.

    Raises:
        UsageError: If the file exists or cannot be written, or the long form is requested for a
            library other than Linen.
    """
    path = files.local_path(file)
    if path.suffix != ".py":
        raise UsageError(f"{file!r} must end in .py, such as {_OWN_NAME}.py.")
    if config.long and config.library not in (None, "linen"):
        raise UsageError(
            f"--long is for Linen only, got --library={config.library}. The short form works "
            "with every library."
        )
    starter = "long" if config.long else config.library or "nnx"
    text = pathlib.Path(starters.__file__).with_name(f"{starter}.py").read_text()
    try:
        with path.open("x") as out:
            text = text.replace(f"{_OWN_NAME}.py", path.as_posix())
            out.write(text.replace(f"runs/{_OWN_NAME}", f"runs/{path.stem}"))
    except FileExistsError:
        raise UsageError(f"{file!r} exists already. Name a new file.") from None
    except OSError as error:
        raise UsageError(f"{file!r} cannot be written: {error.strerror}.") from None
    print(f"Wrote {file}. It trains on the embedded digits: tekoa train {file}")
    return 0
