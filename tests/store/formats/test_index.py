"""The index file: read as written, and refused if damaged."""

import pytest

from tekoa.store import errors
from tekoa.store.formats.index import Index, read_index, write_index
from tekoa.store.formats.leaves import Leaf


def test_index_is_read_as_written(tmp_path):
    leaf = Leaf(name=("p", "a.b", ""), shape=(2,), dtype="int4", kind="array")
    index = Index(
        step=3,
        leaves={leaf.name: leaf},
        items=["p", "empty"],
        meta={"x": [1]},
        metrics={"loss": 0.5},
        nodes={("p",): "State"},
    )
    write_index(tmp_path, index)
    assert read_index(tmp_path) == index


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"leaves": 3}', "null"])
def test_unreadable_index_is_damage(tmp_path, text):
    (tmp_path / "tekoa.json").write_text(text)
    with pytest.raises(errors.DamagedError, match=r"tekoa\.json"):
        read_index(tmp_path)


def test_index_with_a_leaf_inside_a_leaf_is_damage(tmp_path):
    inner, outer = (Leaf(name=name, shape=(), dtype="int8") for name in (("a", "b"), ("a",)))
    index = Index(step=1, leaves={("a", "b"): inner, ("a",): outer}, items=["a"], meta={})
    write_index(tmp_path, index)
    with pytest.raises(errors.DamagedError, match="both a leaf and a node"):
        read_index(tmp_path)
