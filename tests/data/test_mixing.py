import numpy as np
import pytest

from tekoa import data


def numbers(n, start=0, **fields):
    return data.as_source({"x": np.arange(n) + start, **fields})


def test_a_pattern_names_a_mixture(tmp_path):
    for name, n, start in (("a", 6, 0), ("b1", 2, 100), ("b2", 2, 102)):
        np.savez(tmp_path / f"{name}.npz", x=np.arange(n) + start)
    pattern = f"mix://3*{tmp_path}/a.npz; 1*{tmp_path}/b*.npz"
    batches = data.load(pattern).batches(8, shuffle=True, seed=1)
    rows = np.concatenate([next(batches)["x"] for _ in range(10)])  # 8 epochs of 10.
    assert batches.examples_per_source == {f"{tmp_path}/a.npz": 60, f"{tmp_path}/b*.npz": 20}
    assert set(rows.tolist()) == {*range(6), *range(100, 104)}


def test_a_mixture_of_texts_and_of_packed_texts(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name * 20}\n" * 30)
    pattern = f"mix://1*{tmp_path}/a.txt; 3*{tmp_path}/b.txt"
    for source in (
        data.tokens(pattern, None, 16, random_skip=True),
        data.open_parts(pattern, lambda part: data.documents(part).pack(64)),
    ):
        batches = source.batches(8)
        tokens = np.concatenate([next(batches)["tokens"] for _ in range(16)])
        assert [sum(ord(c) in row for row in tokens) for c in "ab"] == [32, 96]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("mix://a.npz; 1*b.npz", "'a.npz' must have the form WEIGHT"),
        ("mix://x*a.npz", "must have the form WEIGHT"),
        ("mix://1*digits://split=test; 2*digits://split=test", "twice"),
        ("mix://0*digits://split=test", "must be a positive number, got 0.0"),
        ("mix://nan*digits://split=test", "must be a positive number, got nan"),
        ("mix://1*no_such_file", "'no_such_file' matches no file"),
        ("mix://1*mix://1*digits://split=test", "Use mix on the sources before"),
    ],
)
def test_invalid_mixtures_are_named(pattern, message):
    with pytest.raises(data.DataError, match=message):
        data.load(pattern)


def test_files_of_a_mixture_cannot_be_listed():
    with pytest.raises(data.DataError, match="mixture of sources, but a list of files"):
        data.filenames("mix://1*digits://split=test")


def test_sources_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match=r"weights has the names \['a'\], but the sources are"):
        data.mix({"a": numbers(3), "b": numbers(3)}, {"a": 1})
    with pytest.raises(ValueError, match="below a billionth"):
        data.mix({"a": numbers(3), "b": numbers(3)}, {"a": 1, "b": 1e-10})
    with pytest.raises(data.DataError, match="different fields"):
        data.mix({"a": numbers(3), "b": numbers(3, y=np.zeros(3))})
    mixed = data.mix({"a": numbers(3), "b": numbers(3)})
    for call in (lambda: mixed.take(2), lambda: mixed.divide(0.5), lambda: mixed.shard(0, 2)):
        with pytest.raises(data.DataError, match="is a mixture or has length buckets"):
            call()
    with pytest.raises(data.DataError, match="no consecutive batches"):
        mixed.batches(2, consecutive=2)


def test_maps_apply_before_and_after_mixing():
    sources = {"a": numbers(4).map_batch(_negate), "b": numbers(4, 100)}
    rows = next(data.mix(sources).map_batch(_double).batches(8))["x"]
    assert sorted(rows.tolist()) == [-6, -4, -2, 0, 200, 202, 204, 206]


def _negate(batch):
    return {"x": -batch["x"]}


def _double(batch):
    return {"x": batch["x"] * 2}
