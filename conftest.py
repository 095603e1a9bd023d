"""Eight CPU devices for every test, and the options of the test run."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_addoption(parser):
    """Adds the option that records the figures of the fault tests."""
    parser.addoption(
        "--record-figures",
        action="store_true",
        help="write the figures of the fault tests to docs/reliability.json",
    )
