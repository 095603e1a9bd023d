import os
import shutil

import numpy as np
import pytest

from tekoa import store
from tekoa.store.mirror import mirror
from tekoa.store.mirror.view import View


def save(directory, step, value=None):
    with store.Store(directory, keep=[store.KeepLast(9)]) as writer:
        writer.save(step, {"w": np.full(3, float(value or step))}, replace=value is not None)


@pytest.fixture
def writer(url):
    """A working copy with one step, a function that waits until it is published, and a reader."""
    with store.mirrored(url) as directory:
        publisher = mirror._publishers[url]

        def publish():
            assert publisher.wait(60)

        save(directory, 1)
        publish()
        view = View(url)
        view.refresh()
        yield directory, publish, view


def test_a_reader_follows_a_writer(writer):
    directory, publish, view = writer
    view.complete()
    assert store.load(view.directory)["w"].tolist() == [1.0] * 3
    save(directory, 1, value=5)  # Another history.
    (directory / "metrics.jsonl").write_text("x")
    save(directory, 2)
    shutil.rmtree(directory / "checkpoint_1")
    save(directory, 3)
    publish()
    view.refresh()
    view.complete()
    assert store.load(view.directory)["step"] == 3
    assert sorted(os.listdir(view.directory)) == [
        "checkpoint_2",
        "checkpoint_3",
        "metrics.jsonl",
    ]


def test_a_step_that_is_removed_while_it_is_read_is_no_damage(writer, caplog):
    """The reader finds objects missing, sees that there is a new head, and follows it."""
    directory, publish, view = writer
    shutil.rmtree(directory / "checkpoint_1")
    save(directory, 2)
    publish()
    view.complete()
    assert store.load(view.directory)["step"] == 2
    assert "damaged" not in caplog.text
