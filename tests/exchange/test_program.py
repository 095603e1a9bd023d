"""Trained models as programs."""

import subprocess
import sys

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from tekoa.bridges import any_model
from tekoa.core.model import ModelFns
from tekoa.exchange import program
from tekoa.exchange.trained import Trained

X = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(3)(x))
        return nn.Dropout(0.5, deterministic=not train)(x)


class NNXNet(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.fc, self.drop = nnx.Linear(4, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.fc(x))


def haiku_net(x):
    return hk.Linear(3)(x)


def recurrent():
    """A model whose carry counts the batches that it has seen."""

    def init(rng, inputs):
        return {"w": jnp.ones((4, 3))}, {"carry": jnp.ones((inputs[0].shape[0], 1))}

    def apply(params, variables, inputs, *, rng, train):
        return inputs[0] @ params["w"] + variables["carry"], {"carry": variables["carry"] + 1}

    return ModelFns(init=init, apply=apply)


MODELS = {
    "linen": LinenNet,
    "nnx": NNXNet,
    "equinox": lambda: eqx.nn.Linear(4, 3, key=jax.random.key(0)),
    "haiku": lambda: hk.transform(haiku_net),
    "functions": lambda: any_model.as_model_fns({"w": jnp.ones((4, 3))}, lambda p, x: x @ p["w"]),
    "recurrent": recurrent,
}


def trained_model(name):
    fns = any_model.as_model_fns(MODELS[name]())
    params, variables = fns.init(jax.random.key(1), (X,))
    rest = {k: v for k, v in variables.items() if k != "carry"}
    outputs, _ = fns.apply(params, variables, (X,), rng=jax.random.key(0), train=False)
    return fns, Trained(params=params, variables=rest), np.asarray(outputs)


@pytest.mark.parametrize("name", MODELS)
def test_a_program_of_any_library_has_the_outputs_of_the_model_for_any_rows(name, tmp_path):
    fns, weights, expected = trained_model(name)
    infer = program.inference_fn(fns, weights, (X,))
    shapes = program.write_stablehlo(tmp_path / "a", infer, (X,), None)
    assert str(shapes.shape) == "(batch, 3)"
    exported = jax.export.deserialize(bytearray((tmp_path / "a").read_bytes()))
    assert set(exported.platforms) == {"cpu", "cuda", "rocm", "tpu"}
    np.testing.assert_allclose(exported.call(X), expected, atol=1e-5)
    np.testing.assert_allclose(exported.call(X[:2]), expected[:2], atol=1e-5)


def test_a_program_runs_without_tekoa(tmp_path):
    fns, weights, expected = trained_model("linen")
    infer = program.inference_fn(fns, weights, (X,))
    program.write_stablehlo(tmp_path / "a", infer, (X,), None)
    np.save(tmp_path / "x.npy", X)
    code = (
        "import sys, jax, numpy as np; from jax import export\n"
        "f = export.deserialize(bytearray(open('a', 'rb').read()))\n"
        "np.save('y.npy', f.call(np.load('x.npy')))\n"
        "assert not {'tekoa', 'flax'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected, atol=1e-5)


def test_a_model_that_needs_fixed_rows_is_exported_with_a_batch_size(tmp_path):
    def apply(params, x):
        return x * params["w"] * float(x.shape[0])

    fns = any_model.as_model_fns({"w": jnp.ones(())}, apply)
    weights = Trained(params={"w": np.asarray(2, np.float32)}, variables={})
    infer = program.inference_fn(fns, weights, (X,))
    with pytest.raises(program.ExportError, match="set the batch size"):
        program.write_stablehlo(tmp_path / "a", infer, (X,), None)
    assert not (tmp_path / "a").exists()
    program.write_stablehlo(tmp_path / "a", infer, (X,), 2)
    exported = jax.export.deserialize(bytearray((tmp_path / "a").read_bytes()))
    np.testing.assert_allclose(exported.call(X[:2]), X[:2] * 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_onnxruntime_computes_the_outputs_of_the_model(name, tmp_path):
    pytest.importorskip("jax2onnx", reason="needs tekoa[ecosystem-test]")
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs tekoa[ecosystem-test]")
    fns, weights, expected = trained_model(name)
    infer = program.inference_fn(fns, weights, (X,))
    program.write_onnx(tmp_path / "a.onnx", infer, (X,), None)
    session = onnxruntime.InferenceSession(str(tmp_path / "a.onnx"))
    (outputs,) = session.run(["output_0"], {"input_0": X[:3]})
    np.testing.assert_allclose(outputs, expected[:3], atol=1e-5)
