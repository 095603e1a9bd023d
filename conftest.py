"""Eight CPU devices and programs that compile fast, and the options of the test run."""

import importlib.metadata
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Tests compile thousands of programs and run each a few times on tiny arrays. Later versions of
# XLA do not know the third flag; without it, unoptimized steps round differently in a scan.
_IS_COMPILED_FAST = importlib.metadata.version("jaxlib").startswith("0.10.")
_FAST_TO_COMPILE = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
]


def pytest_addoption(parser):
    """Adds the options for optimized programs and for the figures of the fault tests."""
    parser.addoption(
        "--optimized",
        action="store_true",
        help="compile with all optimizations of XLA, as users do; it takes twice the time",
    )
    parser.addoption(
        "--record-figures",
        action="store_true",
        help="write the figures of the fault tests to docs/reliability.json",
    )

    parser.addoption(
        "--list-skipped",
        metavar="FILE",
        help="append the names of skipped tests to a file; `pytest @FILE` runs them",
    )


class _SkippedList:
    """Appends the names of skipped tests and modules to a file, each once."""

    def __init__(self, path):
        self._path, self._names = path, set()

    def pytest_runtest_logreport(self, report):
        if report.skipped and not hasattr(report, "wasxfail") and report.nodeid not in self._names:
            self._names.add(report.nodeid)
            with open(self._path, "a") as file:
                print(report.nodeid, file=file)

    pytest_collectreport = pytest_runtest_logreport


def pytest_configure(config):
    """Sets the flags of XLA before a test can use a device."""
    # Workers of xdist send their reports to the process that started them.
    if config.option.list_skipped and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_SkippedList(config.option.list_skipped))
    flags = [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
    if _IS_COMPILED_FAST and not config.option.optimized:
        flags += _FAST_TO_COMPILE
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()
