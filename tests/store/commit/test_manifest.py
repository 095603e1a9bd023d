"""Manifests: their contents, and how damage is detected."""

import json
import zlib

import pytest

from tekoa.store import errors
from tekoa.store.commit import manifest


@pytest.fixture
def step(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").write_bytes(b"abc")
    (tmp_path / "y").write_bytes(b"")
    manifest.seal(tmp_path, step=4, format="native", facts={"config": "1f"})
    return tmp_path


def rewrite(step, **changes):
    body = json.loads((step / "tekoa.manifest").read_text().splitlines()[0])
    text = json.dumps({**body, **changes}).encode()
    (step / "tekoa.manifest").write_bytes(text + b"\n%08x\n" % zlib.crc32(text))


def test_sealed_files_are_listed_with_size_and_checksum(step):
    sealed = manifest.read(step)
    assert (sealed.step, sealed.format, sealed.facts) == (4, "native", {"config": "1f"})
    assert sealed.files == {"d/x": (3, 0x352441C2), "y": (0, 0)}
    for verify in ("none", "size", "full"):
        manifest.check(step, sealed, verify)


def test_every_flipped_bit_of_the_manifest_is_detected(step):
    data = (step / "tekoa.manifest").read_bytes()
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 4
        (step / "tekoa.manifest").write_bytes(changed)
        with pytest.raises(errors.DamagedError):
            manifest.read(step)


@pytest.mark.parametrize(
    ("data", "detected_by"),
    [(b"abd", {"full"}), (b"ab", {"size", "full"}), (None, {"size", "full"})],
)
def test_each_verification_level_detects_its_kind_of_damage(step, data, detected_by):
    if data is None:
        (step / "d" / "x").unlink()
    else:
        (step / "d" / "x").write_bytes(data)
    sealed = manifest.read(step)
    for verify in ("none", "size", "full"):
        if verify in detected_by:
            with pytest.raises(errors.DamagedError, match="d/x"):
                manifest.check(step, sealed, verify)
        else:
            manifest.check(step, sealed, verify)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "", "a//b"])
def test_paths_outside_the_step_are_refused(step, path):
    rewrite(step, files={path: [1, 2]})
    with pytest.raises(errors.UnsafeError, match="outside the step"):
        manifest.read(step)


def test_other_versions_and_fields_are_refused(step):
    rewrite(step, version=2)
    with pytest.raises(errors.NewerVersionError, match=r"version 2.*Update Tekoa"):
        manifest.read(step)
    rewrite(step, version="2")
    with pytest.raises(errors.DamagedError, match="unreadable"):
        manifest.read(step)
    rewrite(step, version=1, facts=[])
    with pytest.raises(errors.DamagedError, match="facts"):
        manifest.read(step)
    rewrite(step, version=1, files={"x": [float("inf"), 1]})
    with pytest.raises(errors.DamagedError, match="unreadable"):
        manifest.read(step)
    rewrite(step, version=1, surprise=1)
    with pytest.raises(errors.DamagedError, match="unreadable"):
        manifest.read(step)


def test_unknown_verification_is_an_error(step):
    with pytest.raises(ValueError, match="'none', 'size' or 'full'"):
        manifest.check(step, manifest.read(step), "quick")
