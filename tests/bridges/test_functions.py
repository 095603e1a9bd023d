import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.bridges import functions

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
RNG = jax.random.key(0)
W = np.full((8, 3), 0.1, np.float32)


def applied(apply, init=W, train=True):
    fns = functions.model_fns(init, apply)
    params, variables = fns.init(RNG, (X,))
    return fns.apply(params, variables, (X,), rng=RNG, train=train)


def test_parameters_may_be_given_or_made():
    for init in (W, lambda rng, x: jnp.full((x.shape[1], 3), 0.1)):
        outputs, changed = applied(lambda w, x: x @ w, init)
        np.testing.assert_allclose(outputs, X @ W, rtol=1e-5, atol=1e-6)
        assert changed == {}


@pytest.mark.parametrize("train", [True, False])
def test_the_mode_is_handed_over_by_name(train):
    seen = {}
    applied(lambda w, x, train: seen.update(train=train), train=train)
    applied(lambda w, x, *, is_training: seen.update(is_training=is_training), train=train)
    applied(lambda w, x, deterministic: seen.update(still=deterministic), train=train)
    assert seen == {"train": train, "is_training": train, "still": not train}


@pytest.mark.parametrize("apply", [lambda w, x, rng: rng, lambda w, rng, x: rng])
def test_a_key_is_handed_over_by_name_or_in_second_place(apply):
    assert applied(apply)[0] is RNG


def test_variables_go_in_and_out():
    outputs, changed = applied(
        lambda w, x, variables: (x @ w, {"n": variables["n"] + 1}),
        lambda rng, x: (jnp.array(W), {"n": jnp.zeros(())}),
    )
    assert outputs.shape == (16, 3)
    assert float(changed["n"]) == 1.0


def test_an_apply_with_variables_needs_an_init_that_makes_them():
    with pytest.raises(TypeError, match=r"init must give \(params, variables\)"):
        applied(lambda w, x, variables: (x, variables))


def haiku_net(x):
    return hk.Linear(3)(x)


def test_haiku_pairs_train(train):
    fns = functions.haiku_model_fns(hk.transform(haiku_net))
    _, losses = train(fns, 20)
    assert losses[-1] < losses[0]


def test_haiku_state_moves_in_training_only():
    def forward(x):
        n = hk.get_state("n", [], init=jnp.zeros)
        hk.set_state("n", n + 1)
        return hk.Linear(3)(x)

    fns = functions.haiku_model_fns(hk.transform_with_state(forward))
    params, variables = fns.init(RNG, (X,))
    _, changed = fns.apply(params, variables, (X,), rng=RNG, train=True)
    assert [float(x) for x in jax.tree.leaves(changed)] == [1.0]
    assert fns.apply(params, variables, (X,), rng=RNG, train=False)[1] == {}
