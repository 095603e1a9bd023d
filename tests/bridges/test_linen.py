import functools

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from tekoa.bridges import linen
from tekoa.models import RNNLM

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
RNG = jax.random.key(0)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        self.sow("intermediates", "seen", x)
        return nn.Dense(3)(x)


class Deterministic(nn.Module):
    deterministic: bool | None = None

    @nn.compact
    def __call__(self, x, deterministic: bool | None = None):
        deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
        return nn.Dropout(0.5, deterministic=deterministic)(nn.Dense(3)(x))


def test_init_returns_parameters_and_other_collections():
    params, variables = linen.model_fns(Net()).init(RNG, (X,))
    assert sorted(params) == ["BatchNorm_0", "Dense_0"]
    assert sorted(variables) == ["batch_stats"]


def test_batch_statistics_match_numpy(train):
    state, _ = train(linen.model_fns(Net()), 1, data=[(X, X[:, :3])])
    stats = state.variables["batch_stats"]["BatchNorm_0"]
    np.testing.assert_allclose(stats["mean"], 0.5 * X.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(stats["var"], 0.5 + 0.5 * X.var(0), rtol=1e-5)


def test_dropout_is_on_in_training_and_off_in_evaluation():
    fns = linen.model_fns(Net())
    params, variables = fns.init(RNG, (X,))
    run = functools.partial(fns.apply, params, variables, (X,))
    a, b = (run(rng=jax.random.key(i), train=True)[0] for i in (1, 2))
    assert not np.array_equal(a, b)
    a, changed = run(rng=jax.random.key(1), train=False)
    b, _ = run(rng=jax.random.key(2), train=False)
    np.testing.assert_array_equal(a, b)
    assert changed == {}


@pytest.mark.parametrize(("field", "drops"), [(None, True), (True, False), (False, True)])
def test_a_mode_set_on_the_module_is_not_passed_again(field, drops):
    fns = linen.model_fns(Deterministic(field))
    params, variables = fns.init(RNG, (X,))
    outputs, _ = fns.apply(params, variables, (X,), rng=RNG, train=True)
    assert bool((outputs == 0).any()) == drops


def test_only_mutable_collections_change():
    class Counting(nn.Module):
        @nn.compact
        def __call__(self, x):
            for name in ("a", "b"):
                n = self.variable(name, "n", lambda: jnp.zeros(()))
                if self.is_mutable_collection(name) and not self.is_initializing():
                    n.value += 1
            return nn.Dense(3)(x)

    cases = [(True, {"a", "b"}), (["a", "c"], {"a"}), (False, set()), ("a", {"a"})]
    for mutable, expected in [*cases, (flax.core.DenyList("a"), {"b"})]:
        fns = linen.model_fns(Counting(), mutable=mutable)
        params, variables = fns.init(RNG, (X,))
        _, changed = fns.apply(params, variables, (X,), rng=RNG, train=True)
        assert set(changed) == expected


def test_custom_rng_streams_reach_the_model():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x) + jax.random.normal(self.make_rng("noise"))

    fns = linen.model_fns(
        Noisy().init, Noisy().apply, collections={"init": ["params", "noise"], "apply": ["noise"]}
    )
    params, variables = fns.init(RNG, (X,))
    a, b = (
        fns.apply(params, variables, (X,), rng=jax.random.key(i), train=True)[0] for i in (1, 2)
    )
    assert not np.array_equal(a, b)


def test_a_carry_changes_in_training_and_evaluation():
    model = RNNLM(vocab_size=5, d_model=4, deterministic=True)
    fns = linen.model_fns(model)
    tokens = np.ones((2, 3), np.int32)
    params, variables = fns.init(RNG, (tokens,))
    assert all(not x.any() for x in jax.tree.leaves(variables["carry"]))
    for train in (True, False):
        _, changed = fns.apply(params, variables, (tokens,), rng=RNG, train=train)
        assert all(x.any() for x in jax.tree.leaves(changed["carry"]))


def test_partitioned_parameters_are_plain_arrays():
    dense = nn.Dense(3, kernel_init=nn.with_partitioning(nn.initializers.ones, ("a", "b")))
    params, _ = linen.model_fns(dense).init(RNG, (X,))
    assert isinstance(params["kernel"], jax.Array)


def test_an_init_without_params_is_refused():
    with pytest.raises(TypeError, match="mapping of collections that includes 'params'"):
        linen.model_fns(lambda rngs, x: {"weights": jnp.ones(2)}, lambda *a: a).init(RNG, (X,))


def test_init_without_apply_is_refused():
    with pytest.raises(TypeError, match=r"pass apply=model\.apply"):
        linen.model_fns(lambda rngs, x: {})


def test_training_reduces_the_loss(train):
    _, losses = train(linen.model_fns(nn.Dense(3)), 50)
    assert losses[-1] < losses[0]


def test_training_works_with_an_optax_loss(train):
    _, losses = train(
        linen.model_fns(nn.Dense(3)),
        2,
        loss=lambda out, y: optax.l2_loss(out, y).mean(),
    )
    assert np.isfinite(losses).all()
