"""Writes the table of fault cases in `docs/reliability.md` from the recorded figures.

pytest tests/faults tests/hosts --record-figures && python tests/support/reliability.py
"""

import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from support import figures

PAGE = figures.ROOT / "docs" / "reliability.md"
BEGIN = "<!-- The table is written by tests/support/reliability.py -->"
END = "<!-- End of the table -->"


@dataclasses.dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        case: Its number, as the tests name it.
        what: What is done to the run.
        result: What happens, with the names of figures in braces.
        tests: Tests that show it, below `tests/`; their figures fill `what` and `result`.
        orbax: What plain Orbax did in the same case; a dash where it was not measured.
    """

    case: str
    what: str
    result: str
    tests: tuple[str, ...]
    orbax: str = "\u2013"


KILLS, COMMAND, DAMAGE = "faults/test_kills.py", "faults/test_command.py", "faults/test_damage.py"
READERS, WRITERS, RESUME = (
    "faults/test_readers.py",
    "faults/test_two_writers.py",
    "faults/test_resume.py",
)
PEERS, DISK = "hosts/test_faults.py", "faults/test_slow_disk.py"

CASES = [
    Case(
        "A1",
        "SIGKILL at {kills} random moments around asynchronous saves",
        "{torn} torn, {wrong} wrong, {left} left behind, at most {max_steps_lost} steps lost",
        (f"{KILLS}::test_fifty_kills_at_random_moments",),
        orbax="0 of 52 torn, temporary directories left in 35",
    ),
    Case(
        "A1",
        "SIGKILL at each of {kills} named points of a save",
        "{torn} torn, {wrong} wrong, {left} left behind, at most {max_steps_lost} steps lost",
        (f"{KILLS}::test_kill_at_every_named_point",),
    ),
    Case(
        "A2",
        "training killed {kills} time and stopped {stops} times, Linen and NNX, with carry, "
        "average, batch norm, dropout and metric sums",
        "{differing_leaves} leaves differ at any checkpoint, in both",
        (
            f"{RESUME}::test_runs_killed_and_stopped_give_the_same_bits[linen]",
            f"{RESUME}::test_runs_killed_and_stopped_give_the_same_bits[nnx]",
        ),
    ),
    Case(
        "A2",
        "{kills} SIGKILLs at random moments, a save every 2 steps",
        "every restart resumes, {differing_leaves} leaves differ, nothing left behind",
        (f"{RESUME}::test_kills_with_frequent_saves",),
    ),
    Case(
        "A3",
        "the program ends right after a save, in 3 ways and 2 sizes",
        "{committed} of {programs} committed, {hung} hung",
        ("faults/test_program_end.py::test_a_save_in_flight_is_committed_when_the_program_ends",),
        orbax="0 of 26 committed, 2 hung",
    ),
    Case(
        "A4",
        "SIGTERM or SIGINT at a random step of `tekoa train`",
        "exit code {exit_code}, {steps_lost} steps lost, resume exact; {seconds_to_exit} s to exit",
        (
            f"{COMMAND}::test_a_signal_saves_and_the_resumed_run_is_exact[SIGTERM]",
            f"{COMMAND}::test_a_signal_saves_and_the_resumed_run_is_exact[SIGINT]",
        ),
        orbax="SIGTERM kills at once",
    ),
    Case(
        "A5",
        "SIGTERM to one of two processes",
        "both end with code {exit_code} after the same step, one commit, {steps_lost} steps lost; "
        "{seconds} s to exit",
        (f"{PEERS}::test_a5_a_signal_to_one_stops_both_at_the_same_step",),
    ),
    Case(
        "A6",
        "{bit_flips} bit flips in the newest step",
        "{detected} detected, file named, the previous step restored",
        (f"{DAMAGE}::test_twenty_bit_flips_are_detected_and_the_step_before_is_restored",),
        orbax="6 of 6 restored with wrong values, silently",
    ),
    Case(
        "A7",
        "each file truncated to half its size and to nothing, {cases} cases",
        "all detected, the previous step restored",
        (f"{DAMAGE}::test_truncated_files_are_detected_and_the_step_before_is_restored",),
        orbax="no fallback to an older step",
    ),
    Case(
        "A8",
        "each file deleted, {cases} cases",
        "all detected, the previous step restored",
        (f"{DAMAGE}::test_deleted_files_are_detected_and_the_step_before_is_restored",),
        orbax="no fallback to an older step",
    ),
    Case(
        "A9",
        "all steps damaged",
        "exit code {exit_code}, {bytes_changed} bytes changed",
        (f"{DAMAGE}::test_all_steps_damaged_is_an_error_and_changes_nothing",),
    ),
    Case(
        "A10",
        "disk full",
        "reported after {reported_after_steps} steps, {leftover_bytes} bytes left over, older "
        "steps intact, recovers",
        ("faults/test_disk_full.py::test_full_disk_is_reported_and_survived",),
        orbax="`save()` returns True, `latest_step()` names a step that does not exist",
    ),
    Case(
        "A11",
        "limit on file size",
        "reported after {reported_after_steps} steps, {leftover_bytes} bytes left over, older "
        "steps intact, recovers",
        ("faults/test_disk_full.py::test_limit_on_file_size_is_reported_and_survived",),
    ),
    Case(
        "",
        "writes fail with EIO or ENOSPC",
        "reported at once with the reason; {steps_lost} older steps lost, {left_behind} files left "
        "behind, the next save succeeds",
        (
            f"{DISK}::test_failed_write_is_reported_with_its_reason_and_survived[EIO]",
            f"{DISK}::test_failed_write_is_reported_with_its_reason_and_survived[ENOSPC]",
        ),
    ),
    Case(
        "",
        "slow disk: {saves} saves, each slower than the interval between them",
        "{failed_saves} saves failed, {late_saves} waited for the one before and said so",
        (f"{DISK}::test_saves_on_a_slow_disk_succeed_and_say_that_they_wait",),
    ),
    Case(
        "",
        "stuck disk, then SIGTERM, with a grace period of {grace_seconds} s",
        "exit code {exit_code} after {seconds_to_exit} s; the last committed step is intact",
        (f"{DISK}::test_first_signal_ends_a_run_whose_disk_is_stuck",),
    ),
    Case(
        "A12",
        "a second trainer",
        "refused after {seconds_to_refuse} s with exit code {exit_code}, "
        "the first has {failed_saves_of_first} failed saves",
        (f"{WRITERS}::test_second_trainer_refuses_and_the_first_is_unharmed",),
        orbax="a second manager replaced a committed step",
    ),
    Case(
        "A13",
        "a suspended writer wakes up after its lease was broken",
        "changed {steps_changed_by_the_zombie} steps",
        (f"{WRITERS}::test_zombie_writer_can_neither_commit_nor_delete",),
    ),
    Case(
        "A14",
        "a reader during retention",
        "{restores} restores in {seconds} s beside {saved_meanwhile} saves of a trainer that keeps "
        "1 step: {failed} failed, {wrong} wrong",
        (f"{READERS}::test_a_reader_survives_the_retention_of_a_trainer[in_place]",),
    ),
    Case(
        "A15",
        "kill in the middle of a deletion",
        "0 partial steps listed, space reclaimed at the next start",
        (f"{KILLS}::test_kill_at_every_named_point",),
        orbax="a partial step listed in 6 of 6",
    ),
    Case(
        "A16",
        "{evaluators} evaluators start during saves",
        "the trainer has {failed_saves_of_trainer} failed saves",
        (f"{READERS}::test_twenty_evaluators_do_not_disturb_a_trainer",),
        orbax="a reader with cleanup broke 3 of 12 saves",
    ),
    Case(
        "A17",
        "`tekoa eval_wait` killed {kills} times in the middle of evaluations",
        "{missing} checkpoints missing, {twice} points duplicated",
        (f"{COMMAND}::test_a_killed_evaluator_misses_nothing_and_reports_nothing_twice",),
    ),
    Case(
        "A18",
        "NaN in the data, `--on_nan=skip`",
        "{nan_params_on_disk} NaN parameters on disk, exit code {exit_code}",
        (f"{COMMAND}::test_nan_never_reaches_the_disk[skip]",),
    ),
    Case(
        "A18",
        "NaN in the data, `--on_nan=stop`",
        "{nan_params_on_disk} NaN parameters on disk; the step before is saved, exit code "
        "{exit_code}",
        (f"{COMMAND}::test_nan_never_reaches_the_disk[stop]",),
    ),
    Case(
        "A19",
        "NaN and infinite metrics, both modes",
        "never best, the newest is kept; a best of 0.0 is remembered",
        ("store/commit/test_score.py::", "store/commit/test_retention.py::"),
        orbax="a NaN metric deleted the best checkpoint in 3 of 3",
    ),
    Case(
        "A20",
        "resumed from {resumed_at_steps} steps, across the ends of epochs",
        "{differing_batches} batches differ, each example once per epoch",
        (f"{RESUME}::test_data_resumes_at_its_position",),
    ),
    Case(
        "A21",
        "a different seed, batch size or source",
        "all refused with the reason; `--allow_data_changes` allows it",
        (
            f"{RESUME}::test_changed_data_is_refused_with_the_reason",
            f"{COMMAND}::test_a_changed_seed_is_refused_unless_it_is_allowed",
        ),
    ),
    Case(
        "A22",
        "saved and restored on {devices} devices in turn",
        "restored values differ by {max_difference}",
        ("faults/test_topology.py::test_other_device_counts_restore_the_same_bits",),
    ),
    Case(
        "A23",
        "different shapes, dtypes or names",
        "one error with all differences, no silent cast",
        ("store/read/test_restore.py::",),
    ),
    Case(
        "A24, A25",
        "TensorBoard after {kills} SIGKILLs and resumes",
        "{missing} points missing, {twice} duplicated, {lost_before_last_commit} points before the "
        "last commit lost",
        (f"{COMMAND}::test_tensorboard_after_four_kills_has_every_point_once",),
    ),
    Case(
        "A26",
        "one of two workers is killed during a step, limit {limit_seconds} s",
        "the other ends with code {exit_code} after {seconds} s",
        (f"{PEERS}::test_a26_a_worker_killed_in_a_step_ends_the_other",),
    ),
    Case(
        "A26",
        "one of two workers is killed during a save, limit {limit_seconds} s",
        "as above, after {seconds} s; {partial_commits} partial commits",
        (f"{PEERS}::test_a26_a_worker_killed_in_a_save_leaves_no_part_of_it[mid_write]",),
    ),
    Case(
        "",
        "one of two workers is suspended (SIGSTOP), limit {limit_seconds} s",
        "the other ends with code {exit_code} after {seconds} s; once continued, the "
        "suspended one ends too and changes nothing",
        (f"{PEERS}::test_a_hung_worker_is_given_up",),
        orbax="a hung peer blocks forever",
    ),
    Case(
        "A27",
        "process 0 of two is killed",
        "the other ends with code {exit_code} after {seconds} s; restarted, both "
        "reach the state of the undisturbed run (within 1e-5)",
        (
            f"{PEERS}::test_a27_process_0_killed_ends_the_other",
            f"{PEERS}::test_everything_resumed_is_exact",
        ),
    ),
    Case(
        "A28",
        "{cases} hostile formulas",
        "all refused with the column, none executed",
        ("core/test_formula.py::test_there_are_at_least_60_hostile_formulas",),
    ),
    Case(
        "A29",
        "read-only directory",
        "evaluation works; a trainer is refused at the start with code {exit_code}, after "
        "{seconds_to_error} s",
        (f"{READERS}::test_read_only_directory_can_be_evaluated_and_refuses_a_trainer",),
    ),
    Case(
        "A30",
        "hostile checkpoints, {cases} reads under `strace`",
        "all refused, {outside_opens} opens outside the directory",
        ("faults/test_hostile.py::test_nothing_outside_is_opened",),
        orbax="absolute paths in names wrote outside",
    ),
    Case(
        "",
        "links and foreign entries in the run directory",
        "never followed (a step that is a link is read), never counted as steps, never removed",
        ("faults/test_foreign_entries.py::",),
    ),
    Case(
        "",
        "run directories made of hostile pieces, in every command",
        "nothing outside is touched, no valid step is lost, documented exit codes, no hang",
        ("faults/test_hostile_runs.py::",),
    ),
    Case(
        "",
        "random histories: crashes, roll-backs, damage, restarts, killed evaluators",
        "scores, best copies and points belong to one commit; what training has left is superseded",
        ("faults/test_histories.py::",),
    ),
    Case(
        "",
        "malformed files, for every reader",
        "one message that names the file, in bounded memory",
        ("faults/test_corpus.py::", "faults/test_fuzz.py::"),
    ),
    Case(
        "",
        "files and directories without permission to read or write",
        "reported as such; what may be read is read, and nothing is quarantined",
        ("faults/test_permissions.py::",),
    ),
    Case(
        "",
        "TensorBoard files on a full disk",
        "one warning; training and checkpoints continue, and the points follow once there is space",
        ("extensions/test_tensorboard.py::test_a_full_disk_is_reported_once_and_points_resume",),
    ),
    Case(
        "",
        "power cut, by the order of system calls",
        "{files_and_directories_synced} files and directories of a step synced before the rename, "
        "{written_after_rename} writes after it",
        ("faults/test_power_cut.py::test_every_file_and_directory_is_synced_before_the_rename",),
    ),
]


def render():
    """Returns the table, filled with the recorded figures."""
    record = figures.read_record()
    lines = ["| case | what is done | Tekoa | plain Orbax |", "|---|---|---|---|"]
    for row in CASES:
        recorded = [record.get(test, {}) for test in row.tests]
        values = {key: _merge(key, recorded) for entry in recorded for key in entry}
        what, result = row.what.format(**values), row.result.format(**values)
        lines.append(f"| {row.case} | {what} | {result} | {row.orbax} |")
    return "\n".join(lines)


def _merge(key, recorded):
    """Joins the same figure of several tests: one value, or the range of measured ones."""
    values = [entry[key] for entry in recorded if key in entry]
    if isinstance(values[0], list):
        return ", ".join(map(str, values[0]))
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def split(page):
    """Returns the text before, in and after the table."""
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    return before, table.strip(), after


def main():
    before, _, after = split(PAGE.read_text())
    PAGE.write_text(f"{before}{BEGIN}\n\n{render()}\n\n{END}{after}")


if __name__ == "__main__":
    main()
