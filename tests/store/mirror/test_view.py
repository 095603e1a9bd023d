import os
import shutil

import numpy as np

from tekoa import store
from tekoa.store.mirror import mirror
from tekoa.store.mirror.view import View


def save(directory, step, value=None):
    with store.Store(directory, keep=[store.KeepLast(9)]) as writer:
        writer.save(step, {"w": np.full(3, float(value or step))}, replace=value is not None)


def test_a_reader_follows_a_writer(url):
    with store.mirrored(url) as directory:
        one = mirror._publishers[url]
        save(directory, 1)
        assert one.wait(10)
        view = View(url)
        view.refresh()
        view.complete()
        assert store.load(view.directory)["w"].tolist() == [1.0] * 3
        save(directory, 1, value=5)  # Another history.
        (directory / "metrics.jsonl").write_text("x")
        save(directory, 2)
        shutil.rmtree(directory / "checkpoint_1")
        save(directory, 3)
        assert one.wait(10)
        view.refresh()
        view.complete()
        assert store.load(view.directory)["step"] == 3
        assert sorted(os.listdir(view.directory)) == [
            "checkpoint_2",
            "checkpoint_3",
            "metrics.jsonl",
        ]


def test_a_step_that_is_removed_while_it_is_read_is_no_damage(url, monkeypatch, caplog):
    """The reader finds objects missing, sees that there is a new head, and follows it."""
    with store.mirrored(url) as directory:
        one = mirror._publishers[url]
        save(directory, 1)
        assert one.wait(10)
        view = View(url)
        view.refresh()
        shutil.rmtree(directory / "checkpoint_1")
        save(directory, 2)
        assert one.wait(10)
        view.complete()
        assert store.load(view.directory)["step"] == 2
    assert "damaged" not in caplog.text
