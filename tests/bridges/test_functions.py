import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.bridges import functions

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
RNG = jax.random.key(0)
W = np.full((8, 3), 0.1, np.float32)


def run(apply, init=W, train=True):
    fns = functions.model_fns(init, apply)
    params, variables = fns.init(RNG, (X,))
    return fns.apply(params, variables, (X,), rng=RNG, train=train)


def test_init_may_be_parameters_or_a_function():
    for init in (W, lambda rng, x: jnp.full((x.shape[1], 3), 0.1)):
        outputs, changed = run(lambda w, x: x @ w, init)
        np.testing.assert_allclose(outputs, X @ W, rtol=1e-5, atol=1e-6)
        assert changed == {}


@pytest.mark.parametrize("train", [True, False])
def test_the_mode_is_passed_by_name(train):
    modes = {}
    run(lambda w, x, train: modes.update(train=train), train=train)
    run(lambda w, x, *, is_training: modes.update(is_training=is_training), train=train)
    run(lambda w, x, deterministic: modes.update(still=deterministic), train=train)
    assert modes == {"train": train, "is_training": train, "still": not train}


@pytest.mark.parametrize("apply", [lambda w, x, rng: rng, lambda w, rng, x: rng])
def test_rng_is_passed_by_name_or_as_second_argument(apply):
    assert run(apply)[0] is RNG


def test_variables_are_passed_in_and_returned():
    outputs, changed = run(
        lambda w, x, variables: (x @ w, {"n": variables["n"] + 1}),
        lambda rng, x: (jnp.array(W), {"n": jnp.zeros(())}),
    )
    assert outputs.shape == (16, 3)
    assert float(changed["n"]) == 1.0


def test_apply_with_variables_needs_an_init_that_returns_them():
    with pytest.raises(TypeError, match=r"init must return \(params, variables\)"):
        run(lambda w, x, variables: (x, variables))


def haiku_net(x):
    return hk.Linear(3)(x)


def test_haiku_pairs_train(train):
    fns = functions.haiku_model_fns(hk.transform(haiku_net))
    _, losses = train(fns, 20)
    assert losses[-1] < losses[0]


def test_haiku_state_changes_in_training_only():
    def forward(x):
        n = hk.get_state("n", [], init=jnp.zeros)
        hk.set_state("n", n + 1)
        return hk.Linear(3)(x)

    fns = functions.haiku_model_fns(hk.transform_with_state(forward))
    params, variables = fns.init(RNG, (X,))
    _, changed = fns.apply(params, variables, (X,), rng=RNG, train=True)
    assert [float(x) for x in jax.tree.leaves(changed)] == [1.0]
    assert fns.apply(params, variables, (X,), rng=RNG, train=False)[1] == {}
