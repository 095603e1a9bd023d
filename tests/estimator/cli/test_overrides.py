import dataclasses

import ml_collections
import pytest
from ml_collections import config_dict

from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.cli.overrides import apply_overrides


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float = 0.1


@dataclasses.dataclass(frozen=True)
class Outer:
    size: int = 3
    inner: Inner = Inner()
    flag: bool = True
    shape: tuple[int, ...] = (1, 2)
    name: str = "x"
    unset: float | None = None


def nested(dataclass):
    fields = dataclasses.asdict(dataclass)
    return ml_collections.ConfigDict(fields)


@pytest.fixture(params=["dataclass", "ConfigDict"])
def config(request):
    return Outer() if request.param == "dataclass" else nested(Outer())


def test_values_are_parsed_as_the_type_they_replace(config):
    texts = {"size": "7", "inner.rate": "2", "flag": "false", "shape": "(4,5)", "name": "3"}
    config = apply_overrides(config, {**texts, "unset": "0.5"})
    assert (config.size, config.inner.rate, config.flag) == (7, 2.0, False)
    assert tuple(config.shape) == (4, 5)
    assert (config.name, config.unset) == ("3", 0.5)
    assert isinstance(config.inner.rate, float)


def test_placeholders_have_a_type_before_they_have_a_value():
    kinds = {"steps": int, "rate": float, "path": str, "size": tuple}
    placeholders = {name: config_dict.placeholder(kind) for name, kind in kinds.items()}
    config = ml_collections.ConfigDict(placeholders)
    config = apply_overrides(config, {"steps": "7", "rate": "2", "path": "12", "size": "a,b"})
    assert config.to_dict() == {"steps": 7, "rate": 2.0, "path": "12", "size": ("a", "b")}
    assert isinstance(config.rate, float)
    config = ml_collections.ConfigDict(placeholders)
    apply_overrides(config, {"steps": "None", "path": "None"})
    with pytest.raises(UsageError, match=r"--module_config\.steps must be of type int; got '1\.5'"):
        apply_overrides(config, {"steps": "1.5"})


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("siez", "1", ["siez", "size"]),
        ("inner.rat", "1", ["inner.rat", "rate"]),
        ("size", "1.5", ["size", "int", "1.5"]),
        ("flag", "maybe", ["flag", "bool", "maybe"]),
        ("size.deeper", "1", ["size.deeper"]),
    ],
)
def test_usage_errors_name_the_setting_and_the_value(config, name, text, words):
    with pytest.raises(UsageError) as error:
        apply_overrides(config, {name: text})
    for word in words:
        assert word in str(error.value)
