"""Helper programs of the fault tests, as real processes."""

import pathlib

import pytest

from support import processes

PROGRAMS = pathlib.Path(__file__).parent / "programs"
collect_ignore = ["programs", "fuzz"]


@pytest.fixture
def launch():
    """Starts helper programs, and ends those that still run after the test."""
    programs = []

    def start(name, *args, **options):
        programs.append(processes.Program(PROGRAMS / name, *args, **options))
        return programs[-1]

    yield start
    for program in programs:
        program.close()
