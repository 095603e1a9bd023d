"""A10, A11: a full disk is reported at once and survived."""

import subprocess

import pytest

pytestmark = pytest.mark.slow


def can_mount():
    try:
        return subprocess.run(["unshare", "-m", "true"], check=False).returncode == 0
    except FileNotFoundError:
        return False


def check(result, figure):
    assert result["steps_until_reported"] == 0, result
    assert result["leftover_bytes"] == 0
    assert result["older_intact"]
    assert result["recovered"]
    figure(
        reported_after_steps=result["steps_until_reported"],
        leftover_bytes=result["leftover_bytes"],
        older_intact=result["older_intact"],
        recovered=result["recovered"],
    )


@pytest.mark.skipif(not can_mount(), reason="needs unshare -m, to mount a small file system")
def test_full_disk_is_reported_and_survived(launch, figure, tmp_path):
    mount = f'mount -t tmpfs -o size=80m tmpfs {tmp_path} && exec "$@"'
    prefix = ["unshare", "-m", "sh", "-c", mount, "sh"]
    code, facts, errors = launch("disk_full.py", tmp_path, "full", prefix=prefix).wait()
    assert code == 0, errors
    check(facts[0], figure)
    assert "RESOURCE_EXHAUSTED" in facts[0]["report"] or "No space" in facts[0]["report"]


def test_limit_on_file_size_is_reported_and_survived(launch, figure, tmp_path):
    code, facts, errors = launch("disk_full.py", tmp_path, "limit").wait()
    assert code == 0, errors
    check(facts[0], figure)
