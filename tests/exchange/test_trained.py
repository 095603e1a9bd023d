"""The weights of checkpoints and states."""

import jax
import numpy as np
import pytest
from flax import nnx

import tekoa
from tekoa.bridges import any_model
from tekoa.exchange import trained
from tekoa.store import errors


class Net(nnx.Module):
    def __init__(self, width=3):
        rngs = nnx.Rngs(0)
        self.fc = nnx.Linear(2, width, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.fc(x))


def stored(directory, **options):
    fns = any_model.as_model_fns(Net())
    params, variables = fns.init(None, ())
    state = tekoa.TrainState.of_parts(params, step=4, variables=variables, **options)
    writer = tekoa.CheckpointFileWriter(directory)
    writer(tekoa.Summary(state=state, step=4, metrics={"train": {}}))
    writer.close()
    return fns, state


def test_weights_of_a_directory_get_the_structure_of_the_model(tmp_path):
    fns, state = stored(tmp_path)
    weights = trained.for_model(trained.read(tmp_path), fns, (), what="The run")
    assert weights.step == 4
    assert weights.commit
    assert jax.tree.structure(weights.params) == jax.tree.structure(state.params)
    assert jax.tree.structure(weights.variables) == jax.tree.structure(dict(state.variables))
    assert weights.variables["state"]["drop"]["rngs"]["key"].dtype == jax.random.key(0).dtype
    assert isinstance(tekoa.load(tmp_path, Net()), Net)


def test_the_average_is_read_unless_refused(tmp_path):
    params, _ = any_model.as_model_fns(Net()).init(None, ())
    zeros = jax.tree.map(np.zeros_like, params)
    _, state = stored(tmp_path, average=zeros)
    for source in (tmp_path, state):
        assert not np.any(trained.read(source).params["fc"]["kernel"])
        assert np.any(trained.read(source, average=False).params["fc"]["kernel"])


def test_a_loop_or_result_is_read_by_its_state(tmp_path):
    x = np.ones((4, 2), np.float32)
    result = tekoa.fit(Net(2), (x, x), loss="mse", steps=1, show_progress=False)
    for source in (result, result.loop):
        tekoa.testing.assert_trees_equal(trained.read(source).params, result.params)
    with pytest.raises(TypeError, match=r"got dict. Of bare parameters: .*of_parts"):
        trained.read(result.params)


def test_parameters_that_were_not_trained_are_read_too(tmp_path):
    fns = any_model.as_model_fns(Net(), trainable="bias$")
    params, variables = fns.init(None, ())
    state = tekoa.TrainState.of_parts(params, step=1, variables=variables)
    writer = tekoa.CheckpointFileWriter(tmp_path)
    writer(tekoa.Summary(state=state, step=1))
    writer.close()
    for source in (tmp_path, state):
        weights = trained.read(source)
        assert set(weights.params["fc"]) == {"bias", "kernel"}
        assert set(weights.variables) == {"state"}


def test_a_model_of_other_shapes_is_refused_with_the_arrays(tmp_path):
    stored(tmp_path)
    with pytest.raises(errors.MismatchError, match=r"does not fit the model:[\s\S]*other shape"):
        trained.for_model(
            trained.read(tmp_path), any_model.as_model_fns(Net(4)), (), what="The run"
        )
