import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa import testing
from tekoa.loop.task import TrainTask
from tekoa.loop.train import TrainLoop


def test_first_call_and_new_shape_compile_and_others_do_not():
    two, three = jnp.ones(2), jnp.ones(3)
    step = jax.jit(lambda x: x * 3 + 1)
    with testing.count_compilations() as compiled:
        step(two), step(two)
    assert compiled.total == 1
    with testing.count_compilations() as compiled:
        step(two)
    assert compiled.total == 0
    with testing.count_compilations() as compiled:
        step(three)
    assert compiled.total == 1


def test_what_was_compiled_is_named():
    def my_step(x):
        return x - 1

    x = jnp.ones(2)
    with testing.count_compilations() as compiled:
        jax.jit(my_step)(x)
    assert "my_step" in compiled.names[0]


def test_counting_ends_with_the_block_and_blocks_nest():
    x = jnp.ones(2)
    with testing.count_compilations() as outer:
        with testing.count_compilations() as inner:
            jax.jit(lambda x: x + 1)(x)
        jax.jit(lambda x: x + 2)(x)
    jax.jit(lambda x: x + 3)(x)
    assert (outer.total, inner.total) == (2, 1)


def test_counting_ends_after_an_exception_too():
    with pytest.raises(KeyError), testing.count_compilations() as compiled:
        raise KeyError
    jax.jit(lambda x: x + 4)(np.float32(1))
    assert compiled.total == 0


def test_other_listeners_live_on():
    seen = []

    def listen(event, duration_seconds, **kwargs):
        seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with testing.count_compilations():
            pass
        jax.jit(lambda x: x + 5)(np.float32(1))
        assert seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(
    "tree",
    [
        {"a": np.arange(6).reshape(2, 3), "b": [jnp.ones((), jnp.bfloat16), 2.5, None]},
        np.float32([np.nan, -0.0, np.inf]),
        jax.random.key(3),
        np.zeros((0, 3)),
        {},
    ],
)
def test_a_tree_equals_its_copy(tree):
    testing.assert_trees_equal(tree, jax.tree.map(lambda x: x, tree))


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (
            {"layer": {"w": np.float32([[1, 2], [3, 4]])}},
            {"layer": {"w": np.float32([[1, 2], [5, 6]])}},
            ["'layer/w'", "(1, 0)", "3.0", "5.0", "2 of 4"],
        ),
        (np.float32(1), np.nextafter(np.float32(1), np.float32(2)), ["1.0", "1.0000001"]),
        (np.float32([0.0]), np.float32([-0.0]), ["0.0", "-0.0"]),
        (jnp.ones(2, jnp.bfloat16), jnp.bfloat16([1, 2]), ["(1,)", "1", "2"]),
        ([np.ones(2)], [np.ones(2, np.float32)], ["'0'", "float64[2]", "float32[2]"]),
        ([np.ones(2)], [np.ones((2, 1))], ["float64[2]", "float64[2, 1]"]),
        ({"a": 1}, {"b": 1}, ["structure", "'a'", "'b'"]),
        (jax.random.key(1), jax.random.key(2), ["1", "2"]),
    ],
)
def test_first_difference_is_told(a, b, words):
    with pytest.raises(AssertionError) as error:
        testing.assert_trees_equal(a, b)
    for word in words:
        assert word in str(error.value)


DATA = [(np.full((4, 2), i % 5, np.float32), np.full(4, i, np.float32)) for i in range(20)]


def noisy(params, x, rng):
    return x @ params["w"] + jax.random.normal(rng)


def loop_maker(data=lambda: DATA, apply=noisy, **options):
    def make_loop(reader):
        task = TrainTask(
            apply=apply,
            optimizer=optax.adam(0.1),
            loss=lambda out, y: jnp.mean((out - y) ** 2),
            data=data(),
        )
        options.setdefault("n_steps", 20)
        init = {"w": np.ones(2, np.float32)}
        return TrainLoop(reader(init), task, n_steps_per_checkpoint=4, **options)

    return make_loop


def test_a_loop_that_resumes_exactly_passes():
    testing.check_resume(loop_maker(ema=0.9))
    testing.check_resume(loop_maker(n_steps=None), n_steps=18, at=12)


def test_data_without_a_position_is_found_out():
    # The resumed run sees the first batches again.
    with pytest.raises(AssertionError, match=r"resumed run differs at step 12\. Leaf 'loss'"):
        testing.check_resume(loop_maker(data=lambda: iter(DATA), on_nan="ignore"))


def test_what_is_kept_outside_of_the_state_is_found_out():
    calls = []

    def shifting(params, x):
        shift = jax.pure_callback(
            lambda: calls.append(1) or np.float32(len(calls)), jax.ShapeDtypeStruct((), jnp.float32)
        )
        return x @ params["w"] + jax.lax.stop_gradient(shift)

    with pytest.raises(AssertionError, match="resumed run differs"):
        testing.check_resume(loop_maker(apply=shifting))


def test_a_maker_that_ignores_its_reader_is_told():
    with pytest.raises(AssertionError, match=r"starts at 0: make_loop must"):
        testing.check_resume(lambda reader: loop_maker()(lambda target: target))


def test_without_a_checkpoint_in_the_middle_there_is_nothing_to_check():
    with pytest.raises(ValueError, match=r"no checkpoint at step 7 .* got \[4, 8"):
        testing.check_resume(loop_maker(), at=7)
    with pytest.raises(ValueError, match="needs n_steps"):
        testing.check_resume(loop_maker(n_steps=None))
