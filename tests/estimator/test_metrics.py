import jax
import jax.numpy as jnp
import pytest

from tekoa.estimator import MeanMetrics


def update(made, gathered, *args):
    return made.apply(gathered, *args, method=MeanMetrics.update, mutable=["metrics"])


def test_means_are_of_all_that_was_added():
    made = MeanMetrics.create("loss", "other")
    gathered = made.init(jax.random.key(0))
    for total, count in ((6.0, 2), (jnp.int32(3), jnp.float32(1))):
        value, gathered = update(made, gathered, "loss", total, count)
    assert float(value) == 3
    found = made.apply(gathered)
    assert {name: float(mean) for name, mean in found.items()} == {"loss": 3, "other": 0}
    assert float(made.apply(gathered, "loss")) == 3


def test_a_name_that_nothing_was_added_to_says_so():
    made = MeanMetrics.create("loss", "other")
    _, gathered = update(made, made.init(jax.random.key(0)), "loss", 0.0, 1.0)
    found = made.apply(gathered, method=MeanMetrics.gathered)
    assert {name: bool(there) for name, there in found.items()} == {"loss": True, "other": False}


def test_the_same_under_jit():
    made = MeanMetrics.create("loss")
    gathered = made.init(jax.random.key(0))
    _, gathered = jax.jit(lambda m, x: update(made, m, "loss", x))(gathered, 4.0)
    assert float(jax.jit(made.apply)(gathered)["loss"]) == 4


def test_an_unknown_name_is_refused():
    made = MeanMetrics.create("loss")
    with pytest.raises(ValueError, match=r"no metric 'lost'; there are loss"):
        update(made, made.init(jax.random.key(0)), "lost", 1.0)
