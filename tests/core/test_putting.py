import jax
import numpy as np

from tekoa.core import putting


def test_arrays_go_where_their_shardings_say():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    rows, whole = (jax.NamedSharding(mesh, spec) for spec in (jax.P("data"), jax.P()))
    values = [np.arange(4), jax.random.key(3), np.float32(2)]
    found = putting.put(values, [rows, whole, None])
    assert found[0].sharding == rows
    assert [int(x.data[0]) for x in found[0].addressable_shards] == [0, 2]
    assert found[1].sharding == whole
    assert (jax.random.key_data(found[1]) == jax.random.key_data(values[1])).all()
    assert float(found[2]) == 2


def test_what_other_processes_hold_is_made_of_parts():
    """One process is enough to see that the parts and the key come out right."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    rows, whole = (jax.NamedSharding(mesh, spec) for spec in (jax.P("data"), jax.P()))
    table = np.arange(8.0).reshape(4, 2)
    found = putting._put_far(table, rows)
    assert found.sharding.is_equivalent_to(rows, 2)
    assert (np.asarray(found) == table).all()
    keys = jax.random.split(jax.random.key(5), 4)
    for sharding in (rows, whole):
        moved = putting._put_far(keys, sharding)
        assert moved.sharding.is_equivalent_to(sharding, 1)
        assert (jax.random.key_data(moved) == jax.random.key_data(keys)).all()
