"""`tekoa convert`: copies a checkpoint into another format."""

from tekoa.estimator.cli.flags import RunConfig, UsageError
from tekoa.store.transfer import copy


def run_convert(source: str, destination: str, config: RunConfig) -> int:
    """Copies a checkpoint into the format named by `--to` and returns the exit code.

    Raises:
        UsageError: If `--to` is missing.
    """
    if config.to not in ("native", "t5x"):
        raise UsageError("convert needs a target format: --to=native or --to=t5x.")
    print(f"Wrote {copy.convert(source, destination, format=config.to)}.")
    return 0
