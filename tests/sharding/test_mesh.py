import itertools
import types

import jax
import pytest

from tekoa.sharding import mesh as mesh_lib


def test_the_data_axis_uses_the_remaining_devices():
    mesh = mesh_lib.make_mesh(model=2)
    assert dict(mesh.shape) == {"data": 4, "fsdp": 1, "model": 2}
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_devices_may_stay_unused_if_all_sizes_are_set():
    assert mesh_lib.make_mesh(data=2, fsdp=2).size == 4


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 4, "model": 4}, "needs 16 devices, but there are 8"),
        ({"model": 3}, "needs a multiple of 3 devices, but there are 8"),
        ({"model": 0}, "'model' must have size 1 or more, got 0"),
        ({"x": 3, "y": None}, "x=3 needs a multiple of 3 devices"),
        ({"x": None, "y": None}, "Only one axis"),
        ({"model": 4, "submesh": (1, 2)}, r"\(1, 2\) has 2 devices, but model=4"),
    ],
)
def test_sizes_that_do_not_fit_the_devices_are_an_error(sizes, message):
    with pytest.raises(ValueError, match=message):
        mesh_lib.make_mesh(**sizes)


def test_a_submesh_determines_the_size_of_the_model_axis():
    mesh = mesh_lib.make_mesh(submesh=(2, 2, 1, 1))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 1, "model": 4}


def test_axes_may_have_any_names():
    assert dict(mesh_lib.make_mesh(x=2, y=None).shape) == {"x": 2, "y": 4}
    assert dict(mesh_lib.make_mesh(model=2, expert=4).shape) == {"model": 2, "expert": 4}


def chips(*bounds):
    """Devices of an imaginary machine, in the order of their ids."""
    places = itertools.product(*(range(n) for n in reversed(bounds)))
    return [
        types.SimpleNamespace(coords=tuple(reversed(place[1:])), core_on_chip=place[0])
        for place in places
    ]


def test_blocks_are_contiguous_on_the_hardware():
    blocks = mesh_lib.blocks(chips(4, 2, 1, 1), (2, 1))
    assert blocks.shape == (4, 2)
    for a, b in blocks:
        assert (b.coords[0] - a.coords[0], b.coords[1] - a.coords[1]) == (1, 0)
        assert a.coords[0] % 2 == 0


def test_hardware_that_cannot_be_divided_is_an_error():
    with pytest.raises(ValueError, match=r"shape \(4, 2, 1, 1\) cannot be divided into .*\(3, 1\)"):
        mesh_lib.blocks(chips(4, 2, 1, 1), (3, 1))


def test_devices_without_coordinates_are_used_in_order():
    blocks = mesh_lib.blocks(jax.devices(), (2, 2))
    assert [device.id for device in blocks[1]] == [4, 5, 6, 7]
