"""Tables of names."""

import ml_dtypes
import numpy as np
import pytest

from tekoa.core import rules
from tekoa.exchange import names


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("Dense_0/kernel", (2, 3), ("Dense_0.weight", "i o -> o i")),
        ("conv/kernel", (3, 3, 1, 4), ("conv.weight", "h w i o -> o i h w")),
        ("attention/query/kernel", (8, 2, 4), ("attention.query.weight", "d h k -> (h k) d")),
        ("attention/out/kernel", (2, 4, 8), ("attention.out.weight", "h k d -> d (h k)")),
        ("emb/embedding", (9, 2), ("emb.weight", "")),
        ("ln/scale", (4,), ("ln.weight", "")),
        ("mlp/~/linear_0/w", (2, 3), ("mlp.linear_0.weight", "i o -> o i")),
        ("mlp/~/linear_0/b", (3,), ("mlp.linear_0.bias", "")),
        ("conv/bias", (4, 1, 1), ("conv.bias", "o 1 1 -> o")),
        ("fc/weight", (3, 2), ("fc.weight", "")),
        ("batch_stats/bn/mean", (4,), ("bn.running_mean", "")),
        ("state/bn/var", (4,), ("bn.running_var", "")),
    ],
)
def test_layers_of_all_libraries_are_named_as_in_torch(name, shape, expected):
    assert names.TORCH.find(name, shape) == expected


def test_a_rule_with_axes_is_final_and_one_without_is_not():
    naming = names.naming_of({"^a/kernel$": ("a/weight", "i o -> i o"), "^b/": "c/"})
    assert naming.find("a/kernel", (2, 3)) == ("a.weight", "i o -> i o")
    assert naming.find("b/kernel", (2, 3)) == ("c.weight", "i o -> o i")


def test_two_weights_of_one_name_are_refused():
    weights = {names.PARAMS: {"layer": {"kernel": np.zeros((2, 3)), "scale": np.zeros(3)}}}
    with pytest.raises(ValueError, match=r"would both be named 'layer.weight'"):
        names.to_named(weights, names.TORCH)


def test_names_lead_back_to_the_same_tree():
    rng = np.random.default_rng(0)
    weights = {
        names.PARAMS: {"fc": {"kernel": rng.normal(size=(2, 3)), "bias": rng.normal(size=3)}},
        names.VARIABLES: {"batch_stats": {"bn": {"mean": rng.normal(size=3)}}},
    }
    arrays = names.to_named(weights, names.TORCH)
    assert arrays["fc.weight"].shape == (3, 2)
    back = names.from_named({**arrays, "other": np.zeros(1)}, weights, names.TORCH)
    fc = back[names.PARAMS]["fc"]
    np.testing.assert_array_equal(fc["kernel"], weights[names.PARAMS]["fc"]["kernel"])
    assert back[names.PARAMS]["other"].shape == (1,)
    assert "mean" in back[names.VARIABLES]["batch_stats"]["bn"]


def test_floats_get_the_dtypes_of_the_model_and_integers_do_not():
    target = {names.PARAMS: {"w": np.zeros(2, np.float32), "n": np.zeros(2, np.int32)}}
    stored = {"w": np.array([1.5, 2], ml_dtypes.bfloat16), "n": np.array([1.0, 2.0])}
    back = names.from_named(stored, target, names.NATIVE)[names.PARAMS]
    assert back["w"].dtype == np.float32
    assert back["w"].tolist() == [1.5, 2]
    assert back["n"].dtype == np.float64


def test_a_file_is_recognised_with_its_prefix():
    target = {names.PARAMS: {"fc": {"kernel": np.zeros((2, 3)), "bias": np.zeros(3)}}}
    stored = ["model.fc.weight", "model.fc.bias", "rest"]
    naming, prefix, n_found = names.recognise(stored, target, names.namings_for(None))
    assert (naming.label, prefix, n_found) == ("torch", "model.", 2)
    naming, prefix, _ = names.recognise(["fc/kernel", "fc/bias"], target, names.namings_for(None))
    assert (naming.label, prefix) == ("native", "")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [("pytorch", "must be 'torch'"), ({"(": "a"}, "not a regular"), ({"a": ("b", "i")}, "form")],
)
def test_wrong_tables_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        names.naming_of(wrong)


def test_a_pattern_that_would_take_years_is_an_error(monkeypatch):
    monkeypatch.setattr(rules, "_MATCH_SECONDS", 0.05)
    naming = names.naming_of({"(a|aa)+$": "x"})
    with pytest.raises(ValueError, match=r"takes more than 0\.05 s"):
        naming.find("a" * 90 + "!", (2,))
