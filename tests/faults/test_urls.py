"""URLs are refused wherever a directory is written to directly; nothing is created."""

import os

import numpy as np
import pytest

import tekoa
from tekoa import data, store
from tekoa.core.files import PathError
from tekoa.extensions.early_stop import EarlyStopping
from tekoa.extensions.profiler import ProfilerTrace
from tekoa.store import t5x

URL = "gs://bucket/run"

TAKERS = {
    "Store": lambda: store.Store(URL),
    "restore": lambda: store.restore(URL, {"w": np.zeros(2)}),
    "t5x.read": lambda: t5x.read(URL),
    "t5x.write": lambda: t5x.write(URL, 3, {"target": {"w": np.zeros(2)}}),
    "convert": lambda: store.convert("no source", URL, format="t5x"),
    "pinned": lambda: store.pinned(URL, 3, "own").__enter__(),
    "CheckpointFileWriter": lambda: tekoa.CheckpointFileWriter(URL),
    "CheckpointFileReader": lambda: tekoa.CheckpointFileReader(URL, None),
    "BestFileWriter": lambda: tekoa.BestFileWriter(URL, "loss", mode="min"),
    "BestFileReader": lambda: tekoa.BestFileReader(URL, "loss", mode="min", target=None),
    "LowestCheckpointFileWriter": lambda: tekoa.LowestCheckpointFileWriter(URL, "loss"),
    "TensorBoardWriter": lambda: tekoa.TensorBoardWriter(URL),
    "EarlyStopping": lambda: EarlyStopping("loss", patience=1, path=URL),
    "ProfilerTrace": lambda: ProfilerTrace(URL, start_step=1, n_steps=1),
    "data.load of npz": lambda: data.load(f"npz://{URL}"),
    "data.load of idx": lambda: data.load(f"idx://{URL}/split=train"),
    "vocabulary": lambda: data.tokens("text.txt", URL, 8),
}


@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS.keys())
def test_urls_are_refused(take, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a b\n")
    with pytest.raises((PathError, data.DataError), match=r"only local paths|unknown scheme"):
        take()
    assert os.listdir() == ["text.txt"]
