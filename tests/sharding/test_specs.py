import logging

import jax
import pytest

from tekoa.sharding import specs

SIZES = {"data": 2, "fsdp": 2, "model": 4}
P = jax.P


def named(shapes, table=(), logical=(), logical_rules=()):
    result = specs.named_specs(
        {tuple(name.split("/")): shape for name, shape in shapes.items()},
        SIZES,
        table=dict(table),
        logical={tuple(name.split("/")): axes for name, axes in dict(logical).items()},
        logical_rules=logical_rules,
    )
    return {"/".join(name): spec for name, spec in result.items()}


def test_the_first_matching_rule_wins_and_other_arrays_are_not_split():
    table = {"out/kernel": ("model", None), "kernel$": (None, ("fsdp", "model"))}
    shapes = {"in/kernel": (4, 8), "out/kernel": (8, 4), "bias": (8,)}
    assert named(shapes, table) == {
        "in/kernel": P(None, ("fsdp", "model")),
        "out/kernel": P("model", None),
        "bias": P(),
    }


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (("data", None, "model"), r"'a/w' has 3 entries.*shape is \(6, 8\)"),
        (("model",), r"'a/w' of shape \(6, 8\) splits 6 into 4 parts over 'model'"),
    ],
)
def test_a_rule_that_does_not_fit_names_the_array(rule, message):
    with pytest.raises(ValueError, match=message):
        named({"a/w": (6, 8)}, {"w": rule})


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (("data", "expert"), "'w' of rules names the axis 'expert'.*'data', 'fsdp', 'model'"),
        ("expert", "names the axis 'expert'"),
        (("data", ("model", "data")), "names an axis twice"),
    ],
)
def test_a_rule_with_unknown_or_repeated_axes_is_an_error(rule, message):
    with pytest.raises(ValueError, match=message):
        specs.check_rules({"w": rule}, SIZES, "rules")


def test_the_name_of_an_axis_splits_the_largest_divisible_dimension():
    shapes = {"a": (6, 10), "b": (3, 5), "c": (), "d": (9, 4, 6)}
    assert named(shapes, {".*": "fsdp"}) == {
        "a": P(None, "fsdp"),
        "b": P(),
        "c": P(),
        "d": P(None, None, "fsdp"),
    }


def test_a_dimension_can_be_split_over_a_second_axis():
    assert specs.split_largest(P("model"), (8, 3), "data", SIZES) == P(("model", "data"))
    assert specs.split_largest(P("model"), (4, 3), "data", SIZES) == P("model")
    assert specs.split_largest(P("data"), (8, 8), "data", SIZES) == P("data")


def test_logical_axes_follow_the_order_of_the_rules_and_use_a_mesh_axis_once():
    rules = (("heads", "model"), ("mlp", "model"), ("embed", "fsdp"), ("vocab", None))
    assert specs.from_logical(("embed", "heads", "mlp"), rules, SIZES) == P("fsdp", "model", None)
    assert specs.from_logical(("mlp", "mlp"), rules, SIZES) == P("model", None)
    assert specs.from_logical(("vocab", None, "data"), rules, SIZES) == P(None, None, "data")


def test_logical_axes_that_cannot_be_split_evenly_are_not_split_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "tekoa"):
        result = named(
            {"table": (257, 8)},
            logical={"table": ("vocab", "embed")},
            logical_rules=(("vocab", "model"), ("embed", "fsdp")),
        )
    assert result == {"table": P(None, "fsdp")}
    assert "table of shape (257, 8) cannot be split evenly" in caplog.text


def slots(shapes, table=()):
    params = {("dense", "kernel"): (8, 16), ("dense", "bias"): (16,)}
    param_specs = {("dense", "kernel"): P("fsdp", "model"), ("dense", "bias"): P("model")}
    result = specs.slot_specs(
        {tuple(name.split("/")): shape for name, shape in shapes.items()},
        params,
        param_specs,
        SIZES,
        table=dict(table),
    )
    return {"/".join(name): spec for name, spec in result.items()}


def test_slots_are_split_like_their_parameters_also_reduced_ones():
    result = slots(
        {
            "0/mu/dense/kernel": (8, 16),
            "0/v/dense/kernel": (1, 16),
            "1/v/dense/kernel": (8, 1),
            "2/v/dense/kernel": (16,),
            "3/v/dense/kernel": (8,),
            "4/v/dense/kernel": (),
            "5/memory/dense/kernel": (10, 8, 16),
            "6/v/dense/kernel": (3, 5),
            "count": (),
        }
    )
    assert result == {
        "0/mu/dense/kernel": P("fsdp", "model"),
        "0/v/dense/kernel": P(None, "model"),
        "1/v/dense/kernel": P("fsdp"),
        "2/v/dense/kernel": P("model"),
        "3/v/dense/kernel": P("fsdp"),
        "4/v/dense/kernel": P(),
        "5/memory/dense/kernel": P(None, "fsdp", "model"),
        "6/v/dense/kernel": P(),
        "count": P(),
    }


def test_slots_without_a_parameter_name_are_matched_by_shape():
    assert slots({"packed/0/1": (8, 16), "packed/1/0": (5,)}) == {
        "packed/0/1": P("fsdp", "model"),
        "packed/1/0": P(),
    }


def test_optimizer_rules_do_not_split_what_cannot_be_split_evenly():
    shapes = {"mu/dense/kernel": (8, 16), "v/dense/kernel": (1, 1), "count": ()}
    assert slots(shapes, {".*": "data"}) == {
        "mu/dense/kernel": P(("fsdp", "data"), "model"),
        "v/dense/kernel": P(),
        "count": P(),
    }
    assert slots(shapes, {".*": ("data",)}) == {
        "mu/dense/kernel": P("data"),
        "v/dense/kernel": P(),
        "count": P(),
    }
