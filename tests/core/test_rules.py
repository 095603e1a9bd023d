import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.core import FrozenDict

from tekoa.core import formula, rules


def test_first_match_from_the_start_of_the_name_wins():
    fn = rules.params_fn_from_assign_map({".*/bias": 1, "encoder": 2, ".*": 3})
    assert fn(("encoder", "bias"), ()) == 1
    assert fn(("encoder", "kernel"), ()) == 2
    assert fn(("decoder", "encoder"), ()) == 3


def test_pattern_must_match_from_the_start_but_not_to_the_end():
    fn = rules.params_fn_from_assign_map({"kernel": 1, "enc": 2})
    assert fn(("encoder", "kernel"), ()) == 2
    with pytest.raises(rules.NoRuleError):
        fn(("x", "kernel"), ())


def test_the_name_separator_can_be_chosen():
    fn = rules.params_fn_from_assign_map({r"a\.b$": 1}, name_sep=".")
    assert fn(("a", "b"), ()) == 1


def test_strings_are_formulas_only_if_requested():
    table = {".*": "SHAPE[0] * 2"}
    assert rules.params_fn_from_assign_map(table)(("w",), (3,)) == "SHAPE[0] * 2"
    assert rules.params_fn_from_assign_map(table, eval_str_value=True)(("w",), (3,)) == 6


def test_values_that_are_not_strings_are_returned_unchanged():
    value = object()
    assert rules.params_fn_from_assign_map({".*": value}, eval_str_value=True)((), ()) is value


def test_a_hostile_formula_in_a_table_is_refused():
    fn = rules.params_fn_from_assign_map({".*": "load(1)"}, eval_str_value=True)
    with pytest.raises(formula.FormulaError, match="column 1"):
        fn(("w",), ())


def test_no_match_names_parameter_shape_and_patterns():
    fn = rules.params_fn_from_assign_map({".*/bias$": 1, ".*/scale$": 2})
    with pytest.raises(rules.NoRuleError) as error:
        fn(("dense", "kernel"), (4, 8))
    for word in ["'dense/kernel'", "(4, 8)", ".*/bias$", ".*/scale$", "'.*'"]:
        assert word in str(error.value)


def test_an_invalid_pattern_is_reported_when_the_table_is_created():
    with pytest.raises(ValueError, match=r"'\(' is not a regular expression"):
        rules.params_fn_from_assign_map({"(": 1})


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="dense")(x)


class NnxModel(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(2, 3, rngs=nnx.Rngs(0))


class Dense(eqx.Module):
    kernel: jax.Array
    bias: jax.Array


class EquinoxModel(eqx.Module):
    dense: Dense


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"dense": {"kernel": 0, "bias": 0}},
        lambda: FrozenDict({"dense": {"kernel": 0, "bias": 0}}),
        lambda: LinenModel().init(jax.random.key(0), jnp.ones((1, 2)))["params"],
        lambda: nnx.state(NnxModel(), nnx.Param),
        NnxModel,
        lambda: EquinoxModel(Dense(jnp.ones(1), jnp.ones(1))),
    ],
    ids=["dict", "frozen", "linen", "nnx_state", "nnx_module", "equinox"],
)
def test_a_table_works_for_trees_of_every_library(make):
    tree = make()
    result = rules.map_rules({"kernel$": "k", "^dense/bias$": "b"}, tree)
    assert jax.tree.structure(result) == jax.tree.structure(tree)
    assert sorted(jax.tree.leaves(result)) == ["b", "k"]


def test_map_rules_lists_every_leaf_without_a_rule():
    with pytest.raises(rules.NoRuleError) as error:
        rules.map_rules({"kernel$": 1}, {f"layer_{i}": {"bias": 0, "kernel": 0} for i in range(12)})
    for word in ["'layer_0/bias'", "and 4 more", "kernel$"]:
        assert word in str(error.value)
    assert "'layer_0/kernel'" not in str(error.value)


def test_map_rules_of_an_empty_tree_is_that_tree():
    assert rules.map_rules({}, {"a": None, "b": ()}) == {"a": None, "b": ()}


SLOW = {"(a|aa)+$": 1}


@pytest.mark.parametrize(
    "use",
    [
        lambda name: rules.params_fn_from_assign_map(SLOW)((name,), ()),
        lambda name: rules.map_rules(SLOW, {name: 0}),
        lambda name: rules.first_match(rules.compile_rules(SLOW), (name,)),
        lambda name: rules.unused(SLOW, [(name,)]),
    ],
    ids=["params_fn", "map_rules", "first_match", "unused"],
)
def test_pattern_that_would_take_years_is_an_error(use, monkeypatch):
    monkeypatch.setattr(rules, "_MATCH_SECONDS", 0.05)
    with pytest.raises(ValueError, match=r"'\(a\|aa\)\+\$' takes more than 0.05 s .*'aaaa"):
        use("a" * 90 + "!")
