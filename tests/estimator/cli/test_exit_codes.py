"""One table of exit codes: the code, the help and the documentation agree."""

import pathlib
import re
import signal

import pytest

from tekoa import hosts
from tekoa.estimator.cli import main
from tekoa.estimator.cli.exit_codes import ExitCode
from tekoa.estimator.cli.flags import UsageError
from tekoa.store import errors

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "command.md"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (UsageError.exit_code, ExitCode.USAGE),
        (hosts.HostsError.exit_code, ExitCode.USAGE),
        (hosts.EXIT_PEER_LOST, ExitCode.PEER_LOST),
        (hosts.EXIT_STOPPED, ExitCode.STOPPED),
        (errors.StoreError.exit_code, ExitCode.STORE),
        (errors.DamagedError.exit_code, ExitCode.DAMAGED),
        (errors.NothingUsableError.exit_code, ExitCode.DAMAGED),
        (errors.MismatchError.exit_code, ExitCode.MISMATCH),
        (errors.LeaseHeldError.exit_code, ExitCode.IN_USE),
        (errors.FencedError.exit_code, ExitCode.IN_USE),
        (errors.SaveFailedError.exit_code, ExitCode.SAVE_FAILED),
        (128 + signal.SIGINT, ExitCode.INTERRUPTED),
        (128 + signal.SIGPIPE, ExitCode.PIPE),
        (128 + signal.SIGTERM, ExitCode.TERMINATED),
    ],
)
def test_codes_equal_those_defined_elsewhere(code, expected):
    assert code == expected


def test_every_store_error_has_a_code_in_the_table():
    for thing in vars(errors).values():
        if isinstance(thing, type) and issubclass(thing, errors.StoreError):
            assert thing.exit_code in list(ExitCode)


def test_help_lists_all_codes(capsys):
    main.main(["--help"])
    _, _, table = capsys.readouterr().out.partition("Exit codes:\n")
    assert table.splitlines() == [f"  {code:<4} {code.meaning}" for code in ExitCode]


def test_documentation_lists_all_codes():
    _, _, section = PAGE.read_text().partition("## Exit codes\n")
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", section, re.MULTILINE)
    assert rows == [(str(code.value), code.meaning) for code in ExitCode]
