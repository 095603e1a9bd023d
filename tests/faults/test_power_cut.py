"""Power cut, as far as it can be shown here: the order of syncs around the rename."""

import re
import shutil

import pytest

from tekoa.store.commit import durable


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace, to see the order of calls")
def test_every_file_and_directory_is_synced_before_the_rename(launch, figure, tmp_path):
    log, run = tmp_path / "log", tmp_path / "run"
    prefix = ["strace", "-f", "-y", "-qq", "-e", "trace=fsync,fdatasync,rename,write", "-o", log]
    code, _, errors = launch("trainer.py", run, "--steps", 1, prefix=prefix).wait()
    assert code == 0, errors
    lines = log.read_text().splitlines()
    commit = re.compile(r'rename\("[^"]*/checkpoint_1\.tmp-[0-9a-f]{32}", ')
    (at,) = [i for i, line in enumerate(lines) if commit.search(line)]
    before, after = lines[:at], lines[at + 1 :]
    synced = {path_in(line, "f(data)?sync") for line in before}
    step = run / "checkpoint_1"
    expected = {path for path, _ in durable.walk(step)} | {""}
    assert expected <= synced
    # Nothing of the step is written after its rename.
    assert not [line for line in after if "write(" in line and "checkpoint_1" in line]
    assert any(re.search(rf"fsync\(\d+<{re.escape(str(run))}>", line) for line in after)
    figure({"files_and_directories_synced": len(expected)}, written_after_rename=0)


def path_in(line, call):
    """Returns the path inside the step that a line of strace's log names, or None."""
    match = re.search(rf"{call}\(\d+<.*/checkpoint_1\.tmp-[0-9a-f]{{32}}/?([^>]*)>", line)
    return match and match[match.lastindex]
