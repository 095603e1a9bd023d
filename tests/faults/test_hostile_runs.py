"""Run directories made of hostile pieces, in every command.

Around the run lies a tree that nothing may touch, and in the run are valid steps that nothing may
lose. Every command ends by itself, with a documented code and without a traceback.

TEKOA_EXAMPLES runs that many other examples, and TEKOA_MAX_SECONDS sets the limit for one command,
for a machine that is busy with something else.
"""

import faulthandler
import os
import pathlib
import shutil
import socket
import sys

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from support import hostile
from tekoa.estimator.cli import main
from tekoa.estimator.cli.exit_codes import ExitCode
from tekoa.store import errors
from tekoa.store.commit import lease, paths
from tekoa.store.commit.retention import KeepLast
from tekoa.store.formats import step as step_lib
from tekoa.store.store import Store

TINY = str(pathlib.Path(__file__).parent.parent / "estimator" / "tiny_model.py")
HEX = "0123456789abcdef" * 2
STEPS = (3, 6)
MAX_SECONDS = float(os.environ.get("TEKOA_MAX_SECONDS", "20"))

NAMES = [
    f".trash-{HEX}",
    f"checkpoint_3.tmp-{HEX}",
    f"checkpoint_9.bad-{HEX}",
    "checkpoint_1000",
    "checkpoint_0",
    "checkpoint_06",
    "checkpoint_" + chr(0xFF17),
    "checkpoint_" + "9" * 200,
    "run.json",
    "train_end.json",
    "writer.lease",
    f".writer.lease.{HEX}",
    "train",
    "train/events.out.tfevents.9",
    "eval",
    "eval/last_evaluated_ckpt",
    "eval/evaluations.jsonl",
    "eval/high_accuracy/scores.json",
    "metrics.jsonl",
    "early_stop.json",
    "stop_when.json",
    "rewind.json",
    "source",
    "set_aside-6",
    f"eval/.pin-{HEX}",
    "eval/high_accuracy",
    "eval/high_accuracy/score",
    "eval/high_accuracy/checkpoint_5",
    "save",
    "low_x/score",
    "a\x1b]0;b\x07\nc",
    "-rf",
    b"\xff\xfe".decode(errors="surrogateescape"),
    "n" * 255,
    "deep/deeper/events.out.tfevents.1",
]


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(str(path))
        except OSError:  # The path is too long.
            path.touch()


def forbidden(path):
    hostile.directory(path)
    path.chmod(0)


def damaged_step(path):
    """A copy of a valid step with one changed byte."""
    shutil.copytree(TEMPLATE[0] / "checkpoint_3", path)
    file = path / "tekoa.json"
    file.write_bytes(file.read_bytes()[:-1] + b"]")


def step_with(make):
    """A step whose manifest is something else."""

    def create(path):
        path.mkdir()
        (path / "tekoa.json").write_text("{}")
        make(path / "tekoa.manifest")

    return create


TEMPLATE = []
KINDS = {
    **hostile.IRREGULAR,
    "socket": make_socket,
    "forbidden": forbidden,
    "sparse": hostile.sparse,
    "damaged step": damaged_step,
    "step with a pipe": step_with(os.mkfifo),
    "step with a device": step_with(hostile.device),
    "step with a huge manifest": step_with(hostile.sparse),
    "link to a file": lambda path: path.symlink_to(TEMPLATE[1] / "notes.txt"),
    "link to a directory": lambda path: path.symlink_to(TEMPLATE[1]),
    "link to a step": lambda path: path.symlink_to(TEMPLATE[1] / "checkpoint_7"),
    "hard link": lambda path: os.link(TEMPLATE[1] / "notes.txt", path),
    **{f"JSON, {name}": lambda p, t=text: p.write_bytes(t) for name, text in hostile.JSON.items()},
}


def tree(directory):
    """Everything below a directory, with kinds, sizes, times and contents."""
    entries = {}
    for folder, folders, files in os.walk(directory):
        for name in (*folders, *files):
            path = pathlib.Path(folder, name)
            status = path.lstat()
            content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
            entries[str(path)] = (status.st_mode, status.st_mtime_ns, content)
    return entries


def save(directory, step, **options):
    with Store(directory, **options) as store:
        store.save(step, {"model_params": {"w": np.full(3, float(step))}})
        store.wait()


@pytest.fixture(scope="module", autouse=True)
def short_wait_for_unknown_writers():
    """The wait itself is tested in `tests/store/commit/test_lease.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease, "STALE_SECONDS", 0.5)
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A valid run, and a tree outside of it."""
    root = tmp_path_factory.mktemp("world")
    outside = root / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "thesis.txt").write_text("years of work")
    (outside / "notes.txt").write_text("more of it")
    save(outside, 7)
    flags = [f"--model_dir={root / 'run'}", "--train_pattern=train", "--max_train_steps=6"]
    assert main.main(["train", TINY, *flags, "--check_every_steps=3"]) == 0
    TEMPLATE[:] = [root / "run", outside]
    return root


def store_saves(run):
    with_retention = [KeepLast(1)]
    save(run, 9, keep=with_retention)
    return 0


FLAGS = ["--train_pattern=train", "--eval_pattern=eval", "--max_train_steps=9"]
EVAL_FLAGS = ["--max_train_steps=6", "--save_high=accuracy", "--check_ckpt_every_secs=0"]
STOP_FLAGS = ["--valid_pattern=valid", "--early_stop=accuracy:5:max", "--stop_when=loss<0"]
COMMANDS = {
    "train": lambda run: main.main(["train", TINY, f"--model_dir={run}", *FLAGS, *STOP_FLAGS]),
    "eval_wait": lambda run: main.main(
        ["eval_wait", TINY, f"--model_dir={run}", *FLAGS[:2], *EVAL_FLAGS]
    ),
    "retention": store_saves,
    "inspect": lambda run: main.main(["inspect", str(run)]),
    "page": lambda run: main.main(["page", str(run), f"--out={run.parent / 'page.html'}"]),
    "convert": lambda run: main.main(["convert", str(run), f"{run.parent}/copy", "--to=native"]),
}
CHEAP = [name for name in COMMANDS if name not in ("train", "eval_wait")]

pieces = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(sorted(KINDS)), max_size=4)


def check(world, pieces, commands, capsys):
    scratch = world / "scratch"
    for folder, folders, _ in os.walk(scratch):
        for name in folders:  # Only root can list what is forbidden.
            path = pathlib.Path(folder, name)
            path.is_symlink() or path.chmod(0o700)
    shutil.rmtree(scratch, ignore_errors=True)
    run = scratch / "run"
    shutil.copytree(world / "run", run)
    for name, kind in pieces.items():
        path = run / name
        if os.path.lexists(path):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            KINDS[kind](path)
        except OSError:
            continue  # A piece lies where another needs a directory.
    before = tree(world / "outside")
    # The limit ends the process: the last line of this file then says in which example.
    with (world / "examples.txt").open("a") as file:
        file.write(f"{pieces!r}, {commands}\n")
    for command in commands:
        faulthandler.dump_traceback_later(MAX_SECONDS, exit=True, file=sys.__stderr__)
        try:
            code = COMMANDS[command](run)
        except errors.StoreError as error:  # By the library, not the command.
            code = error.exit_code
        finally:
            faulthandler.cancel_dump_traceback_later()
        shown = "".join(capsys.readouterr())
        assert code in set(ExitCode) - {ExitCode.UNEXPECTED}, (command, code, shown)
        assert "Traceback" not in shown
        assert "\x1b]" not in shown
        assert tree(world / "outside") == before, command
        kept = [n for n in STEPS if is_valid(paths.step_dir(run, n))]
        if command == "retention" and is_valid(paths.step_dir(run, 9)):
            continue
        assert kept == list(STEPS) or "retention" in commands, (command, kept, shown)
    assert any(is_valid(paths.step_dir(run, n)) for n in (*STEPS, 9))


def is_valid(path):
    try:
        step_lib.open_step(path, verify="full")
        return True
    except (errors.StoreError, OSError):
        return False


@hypothesis.settings(max_examples=25, deadline=None, database=None, derandomize=True)
@hypothesis.given(pieces, st.lists(st.sampled_from(CHEAP), min_size=1, max_size=2, unique=True))
def test_readers_survive_hostile_runs(world, pieces, commands):
    with hostile.captured() as capsys:
        check(world, pieces, commands, capsys)


@pytest.mark.slow
@hypothesis.settings(
    max_examples=int(os.environ.get("TEKOA_EXAMPLES", "300")),
    deadline=None,
    database=None,
    derandomize="TEKOA_EXAMPLES" not in os.environ,  # By hand, other examples each time.
)
@hypothesis.given(
    pieces, st.lists(st.sampled_from(sorted(COMMANDS)), min_size=1, max_size=3, unique=True)
)
def test_all_commands_survive_hostile_runs(world, pieces, commands):
    with hostile.captured() as capsys:
        check(world, pieces, commands, capsys)
