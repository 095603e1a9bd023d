"""`tekoa models`: lists the bundled models."""

from tekoa.estimator.cli.flags import RunConfig
from tekoa.estimator.model_file import experiment, names


def run_models(config: RunConfig) -> int:
    """Prints the name and first docstring line of every bundled model."""
    del config
    for name in names.BUNDLED:
        summary, *_ = (experiment.load_module(name).__doc__ or "").splitlines()
        print(f"{name:20} {summary}")
    return 0
