import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.testing import count_compilations


def test_the_first_call_and_a_new_shape_are_counted():
    two, three = jnp.ones(2), jnp.ones(3)
    step = jax.jit(lambda x: x * 3 + 1)
    with count_compilations() as compiled:
        step(two), step(two)
    assert compiled.total == 1
    with count_compilations() as compiled:
        step(two)
    assert compiled.total == 0
    with count_compilations() as compiled:
        step(three)
    assert compiled.total == 1


def test_compiled_functions_are_named():
    def my_step(x):
        return x - 1

    x = jnp.ones(2)
    with count_compilations() as compiled:
        jax.jit(my_step)(x)
    assert "my_step" in compiled.names[0]


def test_blocks_can_be_nested_and_counting_ends_with_them():
    x = jnp.ones(2)
    with count_compilations() as outer:
        with count_compilations() as inner:
            jax.jit(lambda x: x + 1)(x)
        jax.jit(lambda x: x + 2)(x)
    jax.jit(lambda x: x + 3)(x)
    assert (outer.total, inner.total) == (2, 1)


def test_counting_ends_after_an_exception():
    with pytest.raises(KeyError), count_compilations() as compiled:
        raise KeyError
    jax.jit(lambda x: x + 4)(np.float32(1))
    assert compiled.total == 0


def test_other_listeners_are_kept():
    events = []

    def listen(event, duration_seconds, **kwargs):
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with count_compilations():
            pass
        jax.jit(lambda x: x + 5)(np.float32(1))
        assert events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
