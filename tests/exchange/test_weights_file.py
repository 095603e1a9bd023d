"""Files of weights."""

import ml_dtypes
import numpy as np
import pytest

from tekoa.exchange import names, weights_file
from tekoa.store import errors

WEIGHTS = {
    names.PARAMS: {
        "fc": {"kernel": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3)},
        "scale": np.float32(2.0),
    },
    names.VARIABLES: {"state": {"count": np.uint32(7)}},
}


def test_safetensors_keep_bits_dtypes_and_scalars(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "new" / "a.safetensors"
    weights_file.write_safetensors(path, WEIGHTS, names.TORCH)
    stored = library.load_file(path)
    assert stored["fc.weight"].dtype == ml_dtypes.bfloat16
    assert stored["fc.weight"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert stored["weight"].shape == ()
    back, label = weights_file.read_safetensors(path, WEIGHTS, names.namings_for(None))
    assert label == "torch"
    kernel = back[names.PARAMS]["fc"]["kernel"]
    assert kernel.tobytes() == WEIGHTS[names.PARAMS]["fc"]["kernel"].tobytes()
    assert back[names.VARIABLES]["state"]["count"] == 7
    assert [p.name for p in path.parent.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 64])
def test_damaged_files_are_refused(tmp_path, content):
    pytest.importorskip("safetensors")
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(errors.DamagedError, match="is not a safetensors file"):
        weights_file.read_safetensors(path, WEIGHTS, [names.TORCH])
    with pytest.raises(errors.StoreError, match="does not exist"):
        weights_file.read_safetensors(tmp_path / "b.safetensors", WEIGHTS, [names.TORCH])


def test_files_have_the_permissions_of_all_files(tmp_path):
    other = tmp_path / "other"
    other.touch()
    weights_file.write_safetensors(tmp_path / "a.safetensors", WEIGHTS, names.NATIVE)
    assert (tmp_path / "a.safetensors").stat().st_mode == other.stat().st_mode


def test_numpy_files_are_read_by_numpy_alone(tmp_path):
    weights_file.write_numpy(tmp_path / "a.npz", WEIGHTS, names.NATIVE)
    with np.load(tmp_path / "a.npz", allow_pickle=False) as stored:
        assert stored["fc/kernel"].dtype == np.float32
        assert stored["fc/kernel"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_orbax_reads_what_was_written(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    weights_file.write_orbax(tmp_path / "a", WEIGHTS)
    with ocp.PyTreeCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "a")
    assert np.asarray(restored["params"]["fc"]["kernel"]).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert restored["state"]["count"] == 7
    with pytest.raises(FileExistsError):
        weights_file.write_orbax(tmp_path / "a", WEIGHTS)
