"""Things that should not be in a directory, each made by a function of its path."""

import contextlib
import io
import os
import stat

HUGE = 10 * 2**30


def sparse(path, size=HUGE):
    """A file that claims many bytes and occupies none."""
    path.touch()
    os.truncate(path, size)


def device(path):
    """A device that never ends; a dangling link where devices cannot be made."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        path.symlink_to("/dev/zero")


def directory(path):
    path.mkdir()
    (path / "mine.txt").write_text("mine")


IRREGULAR = {
    "pipe": os.mkfifo,
    "device": device,
    "directory": directory,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path.name),
}

JSON = {
    "empty": b"",
    "cut off": b'{"random_seed": 3, "fl',
    "no object": b"[1]",
    "other types": b'{"random_seed": "3", "step": [1], "token": 1, "leaves": 3, "pid": []}',
    "not text": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "long number": b'{"step": ' + b"9" * 5000 + b"}",
    "numbers": b'{"step": NaN, "metrics": {"loss": Infinity}}',
}


class Captured(io.StringIO):
    """What was printed; read once."""

    def readouterr(self):
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return (text,)


@contextlib.contextmanager
def captured():
    """Captures standard output and error; unlike `capsys`, once per example."""
    captured = Captured()
    with contextlib.redirect_stdout(captured), contextlib.redirect_stderr(captured):
        yield captured
