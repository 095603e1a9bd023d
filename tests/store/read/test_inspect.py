"""Inspecting a directory, without JAX."""

import subprocess
import sys

import numpy as np

from tekoa import store
from tekoa.store.read import inspect


def test_steps_are_described_with_their_problems(tmp_path):
    with store.Store(tmp_path, keep=[store.KeepLast(3)]) as writer:
        for step in (1, 2):
            tree = {"w": np.zeros(1000, np.float32)}
            writer.save(step, {"model_params": tree}, meta={"n": step}, metrics={"loss": 0.5})
    (tmp_path / "checkpoint_2" / "tekoa.json").write_text("{}")
    (tmp_path / "checkpoint_3").mkdir()
    first, second, third = inspect.inspect(tmp_path)
    assert (first.step, first.format, first.problem, first.meta) == (1, "native", "", {"n": 1})
    assert first.metrics == {"loss": 0.5}
    assert first.n_bytes > 4000
    assert "tekoa.json" in second.problem
    assert "has no manifest" in third.problem
    assert inspect.inspect(tmp_path / "checkpoint_1") == [first]


def test_t5x_steps_are_recognised(golden):
    (info,) = inspect.inspect(golden / "ts_amos")
    assert (info.step, info.format, info.problem) == (12, "t5x", "")


def test_listing_and_inspecting_do_not_import_jax(tmp_path):
    code = (
        "import sys, tekoa.store.read.inspect as i, tekoa.hosts.signals, tekoa.store.commit.score;"
        f"i.inspect({str(tmp_path)!r});"
        "sys.exit(bool({'jax', 'orbax', 'tensorstore', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
