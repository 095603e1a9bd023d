import itertools
import types

import jax
import pytest

from tekoa.core import sharding_mesh


def test_what_is_not_given_takes_the_devices_that_are_left():
    mesh = sharding_mesh.make_mesh(model=2)
    assert dict(mesh.shape) == {"data": 4, "fsdp": 1, "model": 2}
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_full_sizes_may_leave_devices_idle():
    assert sharding_mesh.make_mesh(data=2, fsdp=2).size == 4


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 4, "model": 4}, "needs 16 devices, but there are 8"),
        ({"model": 3}, "needs a multiple of 3 devices, but there are 8"),
        ({"model": 0}, "'model' must have size 1 or more, got 0"),
        ({"model": 4, "submesh": (1, 2)}, r"\(1, 2\) has 2 devices, but model=4"),
    ],
)
def test_a_mesh_that_cannot_be_made_is_an_error(sizes, message):
    with pytest.raises(ValueError, match=message):
        sharding_mesh.make_mesh(**sizes)


def test_a_submesh_gives_the_size_of_the_model_axis():
    mesh = sharding_mesh.make_mesh(submesh=(2, 2, 1, 1))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 1, "model": 4}


def chips(*bounds):
    """Devices of a made-up machine, in the order of their numbers."""
    places = itertools.product(*(range(n) for n in reversed(bounds)))
    return [
        types.SimpleNamespace(coords=tuple(reversed(place[1:])), core_on_chip=place[0])
        for place in places
    ]


def test_blocks_are_cut_out_of_the_hardware():
    blocks = sharding_mesh.blocks(chips(4, 2, 1, 1), (2, 1))
    assert blocks.shape == (4, 2)
    for a, b in blocks:
        assert (b.coords[0] - a.coords[0], b.coords[1] - a.coords[1]) == (1, 0)
        assert a.coords[0] % 2 == 0


def test_hardware_that_cannot_be_cut_so_is_an_error():
    with pytest.raises(ValueError, match=r"shape \(4, 2, 1, 1\) cannot be cut into .*\(3, 1\)"):
        sharding_mesh.blocks(chips(4, 2, 1, 1), (3, 1))


def test_devices_without_a_place_are_taken_in_order():
    blocks = sharding_mesh.blocks(jax.devices(), (2, 2))
    assert [device.id for device in blocks[1]] == [4, 5, 6, 7]
