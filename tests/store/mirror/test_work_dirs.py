import os
import subprocess
import sys

from tekoa.store.mirror import work_dirs


def test_the_working_copy_of_a_url_is_always_the_same(cache):
    first = work_dirs.of_writer("s3://bucket/runs/mnist")
    assert first == work_dirs.of_writer("s3://bucket/runs/mnist")
    assert first != work_dirs.of_writer("gs://bucket/runs/mnist")
    assert first.is_relative_to(cache)


def test_copies_of_readers_are_removed_at_the_end(cache):
    program = (
        "from tekoa.store.mirror import work_dirs\n"
        "path = work_dirs.of_reader('s3://b/run'); path.mkdir(); (path / 'x').write_text('y')\n"
        "print(path.exists())\n"
    )
    output = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert output == "True\n"
    assert list((work_dirs.root() / "readers").iterdir()) == []


def test_copies_of_killed_readers_are_removed_by_the_next(cache):
    child = subprocess.Popen(["true"])
    child.wait()
    left = work_dirs.root() / "readers" / f"{child.pid}-{'0' * 32}"
    alive = work_dirs.root() / "readers" / f"{os.getppid()}-{'0' * 32}"
    for folder in (left, alive):
        (folder / "run").mkdir(parents=True)
    path = work_dirs.of_reader("s3://b/run")
    assert path.name == "run"
    assert path.parent.is_dir()
    assert alive.exists()
    assert not left.exists()
