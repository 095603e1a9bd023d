import jax
import numpy as np
import optax
import pytest

from tekoa.bridges.functions import model_fns
from tekoa.core import sequence
from tekoa.core import step as steps
from tekoa.loop import runner
from tekoa.loop.dispatch import Dispatcher
from tekoa.loop.feed import Feed
from tekoa.loop.flat import Form
from tekoa.loop.placement import Placement
from tekoa.loop.programs import Programs
from tekoa.loop.task import TrainTask
from tekoa.loop.training import ModelTraining


@pytest.fixture
def run(line):
    """Makes a runner over `n` batches of the tiny problem."""

    def make(n, wanted=1, stop_flag=None):
        fns, tx = model_fns(line.params, line.apply), optax.sgd(0.1)
        data = line.data(n)
        state = steps.init_state(fns, tx, jax.random.key(0), inputs=(data[0][0],))
        form, place = Form(state), Placement(None)
        step = form.step(steps.make_train_step(fns, line.mse, tx))
        many = form.step(sequence.make_train_steps(fns, line.mse, tx))
        dispatcher = Dispatcher(step, many, wanted=wanted, jit=place.jit)
        programs = Programs(dispatcher=dispatcher, last=dispatcher.one)
        return runner.Runner(
            state,
            form=form,
            feed=Feed(data),
            place=place,
            programs=programs,
            stop_flag=stop_flag,
        )

    return make


def test_a_stretch_tells_what_was_run(run, line):
    running = run(10)
    stretch = running.advance(4)
    assert (running.step, stretch.n_steps, stretch.has_grads) == (4, 4, True)
    np.testing.assert_array_equal(stretch.batch[0], line.data(10)[3][0])
    task = TrainTask(optimizer=optax.sgd(0.1), loss=line.mse, data=())
    training = ModelTraining(model_fns(line.params, line.apply), task)
    found, n_bad = runner.read(stretch, running.state, training)
    assert list(found) == ["train"]
    assert sorted(found["train"]) == ["gradients_l2norm", "loss", "weights_l2norm"]
    assert n_bad == 0


def test_nothing_is_drawn_beyond_the_target(run):
    running = run(10, wanted=2)
    for target in (3, 4, 7):
        running.advance(target)
        assert running._feed.state == {"next": target}


def test_data_that_has_ended_gives_nothing(run):
    running = run(3)
    assert running.advance(8).n_steps == 3
    assert running.is_exhausted
    assert running.advance(8) is None


def test_after_a_stop_what_was_drawn_is_run(run):
    class Flag:
        is_up = False

        def is_set(self):
            return self.is_up

    flag = Flag()
    running = run(20, wanted=4, stop_flag=flag)
    real = running._dispatcher.program

    def program(group):
        flag.is_up = True
        return real(group)

    running._dispatcher.program = program
    running.advance(20)
    # One group, and the group whose first batch was drawn to look ahead.
    assert running.step == 8
    assert running._feed.state == {"next": 8}


def test_a_state_that_someone_holds_is_not_overwritten(run):
    running = run(10)
    state = running.state
    running.advance(2)
    assert int(state.step) == 0
    assert int(running.state.step) == 2
