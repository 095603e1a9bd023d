import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa import data, sharding, store
from tekoa.bridges import any_model
from tekoa.core.model import ModelFns
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.run import eval_state
from tekoa.models import mnist
from tekoa.store import errors
from tekoa.store.transfer import copy


@pytest.fixture(scope="module")
def images():
    return (next(data.load("digits://split=test").batches(8))["image"],)


def test_parameters_of_a_step_are_loaded(trained, images):
    fns = any_model.as_model_fns(mnist.CNN(10, (0.0, 16.0)))
    checkpoint = eval_state.EvalReader(fns, images).load(trained / "checkpoint_20")
    expected = store.load(trained, step=20)["model_params"]
    jax.tree.map(np.testing.assert_array_equal, checkpoint.state.eval_params, expected)
    assert checkpoint.step == 20


def test_t5x_steps_are_loaded(trained, images, tmp_path):
    copy.convert(trained, tmp_path, format="t5x")
    fns = any_model.as_model_fns(mnist.CNN(10, (0.0, 16.0)))
    path = eval_state.find_step(tmp_path, None)
    checkpoint = eval_state.EvalReader(fns, images).load(path)
    expected = store.load(trained)["model_params"]
    jax.tree.map(np.testing.assert_array_equal, checkpoint.state.eval_params, expected)


def test_a_step_of_another_model_is_rejected_with_all_differences(trained, images):
    fns = any_model.as_model_fns(mnist.CNN(7, (0.0, 16.0)))
    with pytest.raises(errors.MismatchError) as error:
        eval_state.EvalReader(fns, images).load(trained / "checkpoint_20")
    assert "Dense_1/bias" in str(error.value)
    assert "Dense_1/kernel" in str(error.value)


@pytest.fixture
def refuses_to_run():
    """A model with variables and a carry, whose init may be traced but not run."""

    def init(rng, inputs):
        assert isinstance(rng, jax.core.Tracer)
        x = inputs[0]
        params = {"w": jax.random.normal(rng, (4, 2))}
        return params, {"stats": {"mean": jnp.ones(4)}, "carry": jnp.zeros(x.shape[:1])}

    return ModelFns(init=init, apply=lambda *args, **kwargs: (args, {}))


@pytest.mark.parametrize("n_devices", [1, 2])
def test_a_step_is_restored_onto_shapes_without_init(refuses_to_run, tmp_path, n_devices):
    values = {"w": np.arange(8, dtype=np.float32).reshape(4, 2)}
    mean = {"stats": {"mean": np.arange(4, dtype=np.float32)}}
    with store.Store(tmp_path) as writer:
        writer.save(3, {"model_params": values, "model_state": mean})
    layout = None
    if n_devices > 1:
        mesh = sharding.make_mesh(devices=jax.devices()[:n_devices], data=1, model=n_devices)
        layout = sharding.Layout(mesh=mesh, rules={"w": ("model", None)})
    reader = eval_state.EvalReader(refuses_to_run, (np.zeros((5, 4)),), layout)
    state = reader.load(tmp_path / "checkpoint_3").state
    np.testing.assert_array_equal(state.params["w"], values["w"])
    np.testing.assert_array_equal(state.variables["stats"]["mean"], mean["stats"]["mean"])
    assert state.params["w"].addressable_shards[0].data.shape == (4 // n_devices, 2)
    assert state.carry.shape == (5,)


def test_variables_that_a_step_lacks_start_from_their_initial_values(tmp_path, caplog):
    def init(rng, inputs):
        return {"w": jnp.zeros(2)}, {"stats": {"mean": jnp.ones(4)}}

    with store.Store(tmp_path) as writer:
        writer.save(3, {"model_params": {"w": np.ones(2, np.float32)}})
    reader = eval_state.EvalReader(ModelFns(init=init, apply=lambda *_, **__: ((), {})), ())
    state = reader.load(tmp_path / "checkpoint_3").state
    assert state.params["w"].tolist() == [1, 1]
    assert state.variables["stats"]["mean"].tolist() == [1, 1, 1, 1]
    assert "contains no stats" in caplog.text


def test_the_requested_or_the_newest_step_is_used(trained, tmp_path):
    assert eval_state.find_step(trained, None).name == "checkpoint_25"
    requested = str(trained / "checkpoint_10")
    assert eval_state.find_step(tmp_path, requested).name == "checkpoint_10"
    assert eval_state.find_step(tmp_path, str(trained)).name == "checkpoint_25"
    with pytest.raises(UsageError, match="no checkpoint yet"):
        eval_state.find_step(tmp_path, None)
