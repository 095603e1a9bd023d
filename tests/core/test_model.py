import jax
import jax.numpy as jnp
import pytest

from tekoa.core.model import ModelFns, cast_like, run_model


def run(result, variables=None):
    model = ModelFns(init=lambda rng, inputs: ({}, {}), apply=lambda *a, **k: result)
    return run_model(model, {}, variables or {}, (), rng=jax.random.key(0), train=True)


def test_a_single_output_becomes_a_tuple_and_unchanged_variables_stay():
    outputs, variables = run((jnp.ones(2), {}), {"stats": {"n": jnp.zeros(3)}})
    assert [x.shape for x in outputs] == [(2,)]
    assert variables["stats"]["n"].shape == (3,)


def test_several_outputs_stay_a_tuple():
    outputs, _ = run(((1.0, 2.0), {}))
    assert outputs == (1.0, 2.0)


@pytest.mark.parametrize(
    ("result", "seen"),
    [
        (jnp.ones(2), r"ArrayImpl \(2,\)"),
        ((jnp.ones(2), jnp.ones(2)), r"a tuple of \['ArrayImpl', 'ArrayImpl'\]"),
        (None, "NoneType"),
        ((1, {}, 2), "a tuple of"),
    ],
)
def test_an_apply_with_another_result_is_an_error(result, seen):
    with pytest.raises(TypeError, match=rf"apply must return \(outputs, variables\).*got {seen}"):
        run(result)


def test_a_collection_that_init_did_not_create_is_named():
    with pytest.raises(ValueError, match=r"returned the collections \['new'\].*\['old'\]"):
        run((1.0, {"new": 1.0}), {"old": jnp.zeros(())})


def test_a_variable_keeps_its_dtype():
    _, variables = run((1.0, {"s": jnp.ones(2, jnp.float32)}), {"s": jnp.zeros(2, jnp.bfloat16)})
    assert variables["s"].dtype == jnp.bfloat16


def test_a_variable_that_changes_its_shape_is_named():
    with pytest.raises(ValueError, match=r"'s/a' changed its shape .* \(2,\) to \(3,\)"):
        run((1.0, {"s": {"a": jnp.zeros(3)}}), {"s": {"a": jnp.zeros(2)}})


def test_added_and_removed_leaves_are_named():
    with pytest.raises(ValueError, match=r"'slots'.*removed \['a'\], added \['b'\]"):
        cast_like({"a": jnp.zeros(2)}, {"b": jnp.zeros(2)}, "slots")
