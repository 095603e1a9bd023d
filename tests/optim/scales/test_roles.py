"""Roles of parameters in small functions, written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.optim.scales import roles
from tekoa.optim.scales.auto import scales_of_function
from tekoa.optim.scales.roles import Role
from tekoa.optim.scales.views import View

X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
IDS = np.arange(8) % 5


def roles_of(fn, *batch, **shapes):
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return scales_of_function(fn, params, *batch).roles


def test_kernel_before_another_is_hidden_and_the_last_is_the_output():
    def fn(p, x):
        return jnp.sum((jax.nn.relu(x @ p["a"] + p["bias"]) @ p["b"] + p["last"]) ** 2)

    found = roles_of(fn, X, a=(16, 4), bias=(4,), b=(4, 3), last=(3,))
    assert found["a"] == Role(kind="contracted", contracted=(0,), free=(1,))
    assert found["b"] == Role(kind="contracted", contracted=(0,), free=(1,), is_output=True)
    assert found["bias"] == Role(kind="added", free=(0,))
    assert found["last"] == Role(kind="added", free=(0,), is_output=True)


def test_contraction_with_targets_in_the_loss_is_no_further_kernel():
    loss = lambda p, x, y: -jnp.einsum("bc,bc->", jax.nn.log_softmax(x @ p["w"]), y)
    assert roles_of(loss, X, np.eye(8, dtype="f"), w=(16, 8))["w"].is_output


def test_function_of_a_parameter_counts_as_a_kernel_that_follows():
    fn = lambda p, x: (x @ p["a"]) @ jax.nn.softplus(p["b"])
    assert not roles_of(fn, X, a=(16, 4), b=(4, 3))["a"].is_output


def test_axes_of_length_one_keep_their_role():
    fn = lambda p, x: (x[:, :1] @ p["a"]) @ p["b"]
    found = roles_of(fn, X, a=(1, 4), b=(4, 1))
    assert (found["a"].letters, found["b"].letters) == ("cf", "cf")


def test_experts_selected_by_index_are_batched_kernels():
    fn = lambda p, x, ids: jnp.einsum("bi,bio->bo", x, p["w"][ids])
    found = roles_of(fn, X, IDS, w=(5, 16, 4))
    role = Role(kind="contracted", batched=(0,), contracted=(1,), free=(2,), is_output=True)
    assert found["w"] == role


def test_experts_selected_by_index_have_the_scale_of_experts_in_a_batch():
    params = {"w": jax.ShapeDtypeStruct((8, 16, 4), jnp.float32)}
    x = np.ones((8, 16), "f")
    by_index = lambda p, x: jnp.einsum(
        "bi,bio->bo", x, p["w"][jnp.arange(8) + 0 * x[:, 0].astype(int)]
    )
    in_batch = lambda p, x: jnp.einsum("bi,bio->bo", x, p["w"])
    tables = [scales_of_function(fn, params, x) for fn in (by_index, in_batch)]
    assert tables[0]["w"].eta == tables[1]["w"].eta == 0.25
    assert tables[0]["w"].slot_shape == tables[1]["w"].slot_shape == (8, 1, 4)


def test_rows_that_a_kernel_is_applied_to_are_those_of_an_embedding():
    fn = lambda p, ids: p["table"][ids] @ p["w"]
    found = roles_of(fn, IDS, table=(5, 16), w=(16, 3))
    assert found["table"] == Role(kind="looked up", contracted=(0,), free=(1,))


def test_sampled_outputs_are_contracted_over_their_features():
    fn = lambda p, x, ids: x @ p["w"][ids].T
    role = Role(kind="contracted", contracted=(1,), free=(0,), is_output=True)
    assert roles_of(fn, X, IDS, w=(5, 16))["w"] == role


def test_factors_of_a_matrix_factorization_are_paired_outputs():
    fn = lambda p, i, j: jnp.einsum("bd,bd->b", p["user"][i], p["item"][j])
    found = roles_of(fn, IDS, IDS[::-1].copy(), user=(5, 16), item=(5, 16))
    role = Role(kind="paired", contracted=(1,), batched=(0,), is_output=True)
    assert found == {"user": role, "item": role}


def test_norm_of_a_row_is_not_a_kernel():
    fn = lambda p, ids: jnp.einsum("bd,bd->b", p["table"][ids], p["table"][ids])
    assert roles_of(fn, IDS, table=(5, 16))["table"].kind == "looked up"


def test_embedding_that_is_also_the_output_is_tied():
    fn = lambda p, ids: jnp.tanh(p["table"][ids] @ p["w"]) @ p["table"].T
    found = roles_of(fn, IDS, table=(5, 16), w=(16, 16))
    assert found["table"].is_tied
    assert found["table"].is_output  # As a kernel, which decides on its scale.
    assert not found["w"].is_output
    assert not found["w"].is_tied


def test_kernel_used_twice_in_the_same_way_is_not_tied():
    fn = lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"]
    assert not roles_of(fn, X, w=(16, 16))["w"].is_tied
    transposed = lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T
    assert roles_of(transposed, X, w=(16, 16))["w"].is_tied


def recurrent_in(fn, *batch, **shapes):
    found = roles_of(fn, *batch, **shapes)
    return sorted(name for name, role in found.items() if role.is_recurrent)


@pytest.mark.parametrize("unrolled", [False, True])
@pytest.mark.parametrize("x", [X, jax.ShapeDtypeStruct(X.shape, jnp.float32)])
def test_kernels_applied_to_their_own_results_are_recurrent(unrolled, x):
    def fn(p, x):
        def cell(state, _):
            return jnp.tanh(x @ p["input"] + jnp.tanh(state @ p["up"]) @ p["down"]), None

        state = jnp.zeros((8, 4))
        if unrolled:
            for _ in range(3):
                state, _ = cell(state, None)
        else:
            state, _ = jax.lax.scan(cell, state, None, length=3)
        return state @ p["head"]

    shapes = {"input": (16, 4), "up": (4, 6), "down": (6, 4), "head": (4, 2)}
    assert recurrent_in(fn, x, **shapes) == ["down", "up"]


def test_layers_of_a_stack_are_not_recurrent_even_if_the_stack_is_used_twice():
    def tower(p, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["stack"])[0]

    siamese = lambda p, x: tower(p, x) * tower(p, x[::-1])
    assert recurrent_in(siamese, X, stack=(3, 16, 16)) == []
    looped = lambda p, x: tower(p, tower(p, x))
    assert recurrent_in(looped, X, stack=(3, 16, 16)) == ["stack"]


@pytest.mark.parametrize("unrolled", [False, True])
def test_layers_that_share_their_weights_are_not_recurrent_but_states_with_inputs_are(unrolled):
    def repeated(fn):
        def run(p, x):
            if unrolled:
                y = x
                for _ in range(3):
                    y = fn(p, x, y)
            else:
                y = jax.lax.scan(lambda y, _: (fn(p, x, y), None), x, None, length=3)[0]
            return y @ p["head"]

        return run

    shapes = {"up": (16, 4), "down": (4, 16), "head": (16, 2)}
    layer = repeated(lambda p, x, y: y + jnp.tanh(y @ p["up"]) @ p["down"])
    assert recurrent_in(layer, X, **shapes) == []
    state = repeated(lambda p, x, y: jnp.tanh((x + y) @ p["up"]) @ p["down"])
    assert recurrent_in(state, X, **shapes) == ["down", "up"]


def test_tied_kernels_are_not_recurrent():
    embedding = lambda p, ids: jnp.tanh(p["table"][ids] @ p["w"]) @ p["table"].T
    assert recurrent_in(embedding, IDS, table=(5, 16), w=(16, 16)) == []
    autoencoder = lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T
    assert recurrent_in(autoencoder, X, w=(16, 4)) == []


def test_unused_parameter_has_no_role():
    found = roles_of(lambda p, x: x @ p["w"], X, w=(16, 4), unused=(3, 2))
    assert found["unused"].kind == "unknown"
    assert not found["unused"].is_kernel


@pytest.mark.parametrize(
    ("shape", "n", "letters", "n_groups"),
    [((3, 4, 8), 1, "ccf", 1), ((3, 4, 8), 2, "ccf", 2), ((3, 1, 8), 8, "ccb", 1)],
)
def test_groups_along_an_axis(shape, n, letters, n_groups):
    view = View.whole(0, shape)
    role = roles.role_of_view(view, "contracted", contracted=(0, 1), groups=(2, n))
    assert (role.letters, role.n_groups) == (letters, n_groups)


def test_roles_print_with_the_table():
    params = {"w": jax.ShapeDtypeStruct((16, 4), jnp.float32)}
    table = scales_of_function(lambda p, x: x @ p["w"], params, X)
    assert "cf output" in str(table)
