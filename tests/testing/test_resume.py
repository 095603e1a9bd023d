import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa import TrainLoop, TrainTask
from tekoa.testing import check_resume

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
        params = {"w": np.ones(2, np.float32)}
        return TrainLoop(reader(params), task, n_steps_per_checkpoint=4, **options)

    return make_loop


def test_an_exact_loop_passes():
    check_resume(loop_maker(ema=0.9))
    check_resume(loop_maker(n_steps=None), n_steps=18, at=12)


def test_data_without_a_position_is_detected():
    # The resumed run sees the first batches again.
    with pytest.raises(AssertionError, match=r"resumed run differs at step 12\. Leaf 'loss'"):
        check_resume(loop_maker(data=lambda: iter(DATA), on_nan="ignore"))


def test_values_outside_of_the_state_are_detected():
    calls = []

    def shifting(params, x):
        shift = jax.pure_callback(
            lambda: calls.append(1) or np.float32(len(calls)), jax.ShapeDtypeStruct((), jnp.float32)
        )
        return x @ params["w"] + jax.lax.stop_gradient(shift)

    with pytest.raises(AssertionError, match="resumed run differs"):
        check_resume(loop_maker(apply=shifting))


def test_ignoring_the_reader_is_an_error():
    with pytest.raises(AssertionError, match=r"starts at 0: make_loop must"):
        check_resume(lambda reader: loop_maker()(lambda target: target))


def test_a_checkpoint_before_the_end_is_required():
    with pytest.raises(ValueError, match=r"no checkpoint at step 7 .* got \[4, 8"):
        check_resume(loop_maker(), at=7)
    with pytest.raises(ValueError, match="needs n_steps"):
        check_resume(loop_maker(n_steps=None))
