"""Weights exchanged with PyTorch and Hugging Face, compared by their outputs."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import tekoa

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="needs tekoa[ecosystem-test]")


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Conv(8, (3, 3), name="conv")(x)
        x = nn.BatchNorm(use_running_average=not train, epsilon=1e-5, name="bn")(x)
        x = nn.LayerNorm(epsilon=1e-5, name="ln")(nn.relu(x).mean(axis=(1, 2)))
        return nn.Dense(3, name="fc")(x)


def torch_net(torch):
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(2, 8, 3, padding=1)
            self.bn, self.ln = torch.nn.BatchNorm2d(8), torch.nn.LayerNorm(8)
            self.fc = torch.nn.Linear(8, 3)

        def forward(self, x):
            x = torch.relu(self.bn(self.conv(x))).mean(dim=(2, 3))
            return self.fc(self.ln(x))

    return Module().eval()


def test_torch_computes_the_same_and_the_bits_come_back(torch, tmp_path):
    st = pytest.importorskip("safetensors.torch")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 6, 6, 2)).astype(np.float32)
    variables = Net().init(jax.random.key(0), x)
    variables = jax.tree.map(lambda v: v + rng.uniform(0.1, 1, v.shape).astype(v.dtype), variables)
    params, stats = variables["params"], {"batch_stats": variables["batch_stats"]}
    state = tekoa.TrainState.of_parts(params, variables=stats)
    path = tekoa.export(state, tmp_path / "a.safetensors")
    module = torch_net(torch)
    module.load_state_dict(st.load_file(path), strict=True)
    with torch.no_grad():
        outputs = module(torch.from_numpy(x.transpose(0, 3, 1, 2).copy())).numpy()
    np.testing.assert_allclose(outputs, Net().apply(variables, x), atol=1e-5)
    st.save_file(module.state_dict(), tmp_path / "b.safetensors")
    loaded = tekoa.load_weights(tmp_path / "b.safetensors", params, stats)
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves((params, stats)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_random_streams_stay_in_the_model(torch, tmp_path):
    st = pytest.importorskip("safetensors.torch")

    class WithDropout(nnx.Module):
        def __init__(self, rngs):
            self.bn, self.fc = nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.fc(self.drop(self.bn(x)))

    x = np.ones((3, 4), np.float32)
    fns = tekoa.as_model_fns(WithDropout(nnx.Rngs(0)))
    params, variables = fns.init(jax.random.key(0), (x,))
    path = tekoa.export(tekoa.TrainState.of_parts(params, variables=variables), tmp_path / "a.npz")
    assert "state/drop/rngs/key" in np.load(path)  # Under the model's own names all is there.
    state = tekoa.TrainState.of_parts(params, variables=variables)
    path = tekoa.export(state, tmp_path / "a.safetensors")
    module = torch.nn.ModuleDict({"bn": torch.nn.BatchNorm1d(4), "fc": torch.nn.Linear(4, 2)})
    module.load_state_dict(st.load_file(path), strict=True)
    st.save_file(module.state_dict(), tmp_path / "b.safetensors")
    other_params, other = tekoa.as_model_fns(WithDropout(nnx.Rngs(1))).init(None, ())
    loaded_params, loaded = tekoa.load_weights(tmp_path / "b.safetensors", other_params, other)
    tekoa.testing.assert_trees_equal(loaded_params, params)
    tekoa.testing.assert_trees_equal(loaded["state"]["bn"], variables["state"]["bn"])
    tekoa.testing.assert_trees_equal(loaded["state"]["drop"], other["state"]["drop"])


def gpt2_of_the_docs():
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "export.md").read_text(), re.M | re.S)
    (block,) = [block for block in blocks if "class GPT2" in block]
    namespace = {"tekoa": tekoa, "nn": nn, "jnp": jnp, "__name__": "page"}
    exec(block, namespace)
    return namespace["GPT2"], namespace["WEIGHT_RULES"]


def test_gpt2_of_hugging_face_has_the_same_logits_and_goes_back(torch, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs tekoa[ecosystem-test]")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=97, n_positions=32, n_embd=48, n_layer=3, n_head=4, initializer_range=0.2
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    gpt2, rules = gpt2_of_the_docs()
    model = gpt2(vocab_size=97, n_positions=32, n_layers=3, n_heads=4, width=48)
    tokens = np.random.default_rng(0).integers(97, size=(2, 20)).astype(np.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    params = tekoa.load_weights(tmp_path / "hf" / "model.safetensors", shapes, names=rules)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(model.apply({"params": params}, tokens), expected, atol=1e-4)

    halved = jax.tree.map(lambda x: x / 2, params)
    tekoa.export(
        tekoa.TrainState.of_parts(halved), tmp_path / "hf" / "model.safetensors", names=rules
    )
    back = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        logits = back(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(logits, model.apply({"params": halved}, tokens), atol=1e-4)
