"""A3: a program that ends right after a save commits it, or says that it did not."""

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("end", "code"), [("just_end", 0), ("sys_exit", 0), ("raise", 1)])
def test_save_in_flight_is_committed_at_the_end(launch, figure, tmp_path, end, code):
    process = launch("trainer.py", tmp_path, "--steps", 1, "--size", 2_000_000, "--end", end)
    assert process.end(30)[0] == code
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_1"]
    figure(seconds=round(process.seconds, 2))


def test_all_are_committed(launch, figure, tmp_path):
    ends = ["just_end", "sys_exit", "raise"]
    committed, slowest = 0, 0.0
    for i in range(9):
        directory = tmp_path / str(i)
        args = ["--steps", 2, "--size", 100_000 * i + 1, "--end", ends[i % 3]]
        process = launch("trainer.py", directory, *args)
        process.end(30)
        committed += (directory / "checkpoint_2").is_dir()
        slowest = max(slowest, process.seconds)
    figure(committed=f"{committed}/9", hangs=0, slowest_seconds=round(slowest, 2))
    assert committed == 9


def test_save_that_does_not_end_in_time_gives_an_exit_code_and_a_message(launch, tmp_path):
    args = ["--steps", 1, "--size", 20_000_000, "--end", "just_end", "--grace", 0.001]
    code, _, errors = launch("trainer.py", tmp_path, *args).end(10)
    assert code == 74
    assert "saving step 1 did not end within 0.001 seconds" in errors
    assert not (tmp_path / "checkpoint_1").exists()
