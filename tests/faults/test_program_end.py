"""A3: a program that ends right after a save commits it, or reports that it did not."""

import pytest

pytestmark = pytest.mark.slow
EXIT_CODES = {"just_end": 0, "sys_exit": 0, "raise": 1}


def test_a_save_in_flight_is_committed_when_the_program_ends(launch, figure, tmp_path):
    slowest = 0.0
    for size in (1, 2_000_000):
        for end, code in EXIT_CODES.items():
            directory = tmp_path / f"{end}_{size}"
            args = ["--steps", 1, "--size", size, "--end", end]
            program = launch("trainer.py", directory, *args)
            assert program.wait()[0] == code
            assert [path.name for path in directory.iterdir()] == ["checkpoint_1"]
            slowest = max(slowest, program.seconds)
    figure({"slowest_seconds": round(slowest, 1)}, programs=6, committed=6, hung=0)


def test_a_save_that_does_not_finish_in_time_sets_the_exit_code_and_a_message(launch, tmp_path):
    args = ["--steps", 1, "--size", 20_000_000, "--end", "just_end", "--grace", 0.001]
    code, _, errors = launch("trainer.py", tmp_path, *args).wait()
    assert code == 74
    assert "0.001 seconds" in errors
    assert not (tmp_path / "checkpoint_1").exists()
