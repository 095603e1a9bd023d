import itertools

import jax
import numpy as np
import optax
import pytest

from tekoa.bridges.functions import model_fns
from tekoa.core import metrics
from tekoa.core import step as steps
from tekoa.loop import train_metrics
from tekoa.loop.engine import runner
from tekoa.loop.engine.dispatch import Dispatcher
from tekoa.loop.engine.flat_state import StateCodec
from tekoa.loop.engine.programs import Programs
from tekoa.loop.feed import BatchFeed
from tekoa.loop.task import ModelTraining, TrainTask
from tekoa.loop.train import TrainLoop
from tekoa.sharding.placement import Placement


@pytest.fixture
def run(line):
    """Creates a runner over `n` batches of the tiny problem."""

    def make(n, steps_per_dispatch=1, stop_flag=None, metric_names=()):
        fns, tx = model_fns(line.params, line.apply), optax.sgd(0.1)
        data = line.data(n)
        inputs = (data[0][0],)
        state = steps.init_state(
            fns, tx, jax.random.key(0), inputs=inputs, metric_names=metric_names
        )
        codec, place = StateCodec(state), Placement(None)
        step = steps.make_train_step(fns, line.mse, tx)
        dispatcher = Dispatcher(
            codec.flat_step(step),
            codec.flat_step(steps.scan_steps(step)),
            steps_per_dispatch=steps_per_dispatch,
            jit=place.jit,
        )
        programs = Programs(dispatcher=dispatcher, last=dispatcher.one)
        running = runner.Runner(
            state, codec=codec, feed=BatchFeed(data), place=place, programs=programs
        )
        running.stop_flag = stop_flag
        return running

    return make


def test_a_segment_describes_what_ran(run, line):
    running = run(10)
    segment = running.advance(4)
    assert (running.step, segment.n_steps, segment.has_grads) == (4, 4, True)
    np.testing.assert_array_equal(segment.batch[0], line.data(10)[3][0])
    task = TrainTask(optimizer=optax.sgd(0.1), loss=line.mse, data=())
    training = ModelTraining(model_fns(line.params, line.apply), task)
    metrics, n_bad = train_metrics.read_metrics(segment, running.state, training, {})
    assert list(metrics) == ["train"]
    assert sorted(metrics["train"]) == ["gradients_l2norm", "loss", "weights_l2norm"]
    assert n_bad == 0


def test_nothing_is_drawn_beyond_the_target(run):
    running = run(10, steps_per_dispatch=2)
    for target in (3, 4, 7):
        running.advance(target)
        assert running.feed.state == {"next": target}


def test_exhausted_data_returns_no_segment(run):
    running = run(3)
    assert running.advance(8).n_steps == 3
    assert running.is_exhausted
    assert running.advance(8) is None


def test_batches_drawn_before_a_stop_are_run(run):
    class Flag:
        is_up = False

        def is_set(self):
            return self.is_up

    flag = Flag()
    running = run(20, steps_per_dispatch=4, stop_flag=flag)
    real = running._dispatcher.program

    def program(group):
        flag.is_up = True
        return real(group)

    running._dispatcher.program = program
    running.advance(20)
    # One group, and the group whose first batch was drawn ahead of time.
    assert running.step == 8
    assert running.feed.state == {"next": 8}


def test_the_hook_is_called_before_each_dispatch(run):
    running = run(10, steps_per_dispatch=2)
    completed = []
    running.before_dispatch = completed.append
    running.advance(6)
    assert completed == [0, 2, 4, 5]


def test_the_host_waits_for_the_losses_of_dispatches_in_their_order(run, monkeypatch):
    sent = []
    monkeypatch.setattr(runner.lookahead.Lookahead, "sent", lambda self, loss: sent.append(loss))
    segment = run(10, steps_per_dispatch=4).advance(10)
    assert len(sent) == 4  # Four steps, four steps, one, and the last one by itself.
    assert sent[-1] is segment.output.loss


def test_a_held_state_is_not_overwritten(run):
    running = run(10)
    state = running.state
    running.advance(2)
    assert int(state.step) == 0
    assert int(running.state.step) == 2


def test_emptied_sums_are_not_consumed_by_later_steps(run):
    running = run(10, metric_names=("loss",))
    for target in (2, 4, 6):
        running.advance(target)
        running.reset_sums(metrics.zeros)
        assert float(running.state.sums["loss"].count) == 0
        assert running.state is running.state


def test_batches_of_different_shapes_are_not_grouped(line):
    """Length buckets: groups of equal shapes run together, the others one by one."""

    def final(steps_per_dispatch):
        x, y = line.data(1)[0]
        data = [(x[:n], y[:n]) for n in (4, 4, 2, 4, 2, 2, 4, 4, 4)]
        task = TrainTask(optimizer=optax.sgd(0.1), loss=line.mse, data=data, apply=line.apply)
        loop = TrainLoop(line.params, task, n_steps=9, steps_per_dispatch=steps_per_dispatch)
        return list(loop)[-1].state.params

    jax.tree.map(np.testing.assert_array_equal, final(2), final(1))


def test_the_error_of_a_step_is_not_hidden_by_the_loss_of_its_arrays():
    n_calls = itertools.count()

    def fail_later(x):
        if next(n_calls) == 8:
            raise RuntimeError("the network is gone")
        return x

    def apply(params, x):
        shape = jax.ShapeDtypeStruct((), x.dtype)
        zero = jax.pure_callback(fail_later, shape, 0 * x[0, 0], vmap_method="sequential")
        return x @ params["w"] + zero

    task = TrainTask(
        apply=apply,
        optimizer=optax.sgd(0.1),
        loss=lambda out, y: ((out - y) ** 2).mean(),
        data=[(np.ones((4, 3), np.float32), np.ones(4, np.float32))] * 20,
    )
    params = {"w": np.ones(3, np.float32)}
    loop = TrainLoop(params, task, n_steps=20, n_steps_per_checkpoint=20, steps_per_dispatch=1)
    with pytest.raises(Exception, match="the network is gone"):
        list(loop)
