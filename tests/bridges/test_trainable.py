import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import tekoa
from tekoa.core import trees
from tekoa.core.rules import NoRuleError
from tekoa.testing import assert_trees_equal

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 4)).astype(np.float32)
Y = RNG.normal(size=(8, 2)).astype(np.float32)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="head")(nn.tanh(nn.Dense(3, name="body")(x)))


class Nnx(nnx.Module):
    def __init__(self):
        self.body = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(3, 2, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.head(nnx.tanh(self.body(x)))


class Equinox(eqx.Module):
    body: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self):
        self.body = eqx.nn.Linear(4, 3, key=jax.random.key(0))
        self.head = eqx.nn.Linear(3, 2, key=jax.random.key(1))

    def __call__(self, x):
        return self.head(jnp.tanh(self.body(x)))


def plain(rng, x):
    del rng
    weight = lambda *shape: jnp.ones(shape) / 3
    return {
        "body": {"kernel": weight(x.shape[1], 3), "bias": weight(3)},
        "head": {"kernel": weight(3, 2), "bias": weight(2)},
    }


def apply_plain(params, x):
    x = jnp.tanh(x @ params["body"]["kernel"] + params["body"]["bias"])
    return x @ params["head"]["kernel"] + params["head"]["bias"]


MODELS = {"linen": Linen, "nnx": Nnx, "equinox": Equinox, "functions": lambda: plain}
all_models = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def mse(out, y):
    return jnp.mean((out - y) ** 2)


def make_loop(model, trainable, *, optimizer=None, **options):
    task = tekoa.TrainTask(
        optimizer=optimizer or optax.adam(0.1),
        loss=mse,
        data=[(X, Y)] * 4,
        apply=apply_plain if model is plain else None,
        trainable=trainable,
    )
    options.setdefault("n_steps_per_checkpoint", 2)
    return tekoa.TrainLoop(model, task, n_steps=4, **options)


def all_params(loop):
    """Returns every parameter by name, trained or not."""
    params = trees.named_leaves(loop.state.params)
    return {**params, **trees.named_leaves(loop.state.variables.get("untrained", {}))}


@all_models
def test_only_matching_parameters_change_and_have_slots(make):
    loop = make_loop(make(), "head", ema=0.9)
    before = {name: np.asarray(leaf) for name, leaf in all_params(loop).items()}
    losses = [
        c.metrics["eval"]["loss"] for c in map(loop.evaluation({"loss": mse}, [(X, Y)]), loop)
    ]
    assert losses[1] < losses[0]
    for name, leaf in all_params(loop).items():
        assert np.array_equal(leaf, before[name]) == (name[0] == "body"), name
    for tree in (loop.state.params, loop.state.average, loop.state.opt_state[0].mu):
        assert {name[0] for name in trees.leaf_names(tree)} == {"head"}
    if make is not MODELS["functions"]:
        whole = {name[:2] for name in trees.leaf_names(loop.model)}
        assert {n for n in whole if n[0] in ("body", "head")} == {name[:2] for name in before}


@all_models
def test_auto_trains_a_part_of_a_model(make):
    loop = make_loop(make(), "body", optimizer="auto")
    before = {name: np.asarray(leaf) for name, leaf in all_params(loop).items()}
    for _ in loop:
        pass
    for name, leaf in all_params(loop).items():
        assert np.array_equal(leaf, before[name]) == (name[0] == "head"), name
    etas = loop.facts["optimizer"]["eta"]
    assert {name.split("/")[0] for name in etas} == {"body"}
    # No output, although no other kernel of it is trained: it is kept on its scale.
    ((name, eta),) = ((name, eta) for name, eta in etas.items() if "bias" not in name)
    kernel = np.asarray(all_params(loop)[tuple(name.split("/"))])
    assert np.sqrt(np.mean(kernel**2)) == pytest.approx(eta, rel=1e-5)


CHOICES = {
    "table": {"head": True, ".*": False},
    "words": {"body": "freeze", ".*": "train"},
    "tree": {"body": {"kernel": False, "bias": False}, "head": {"kernel": True, "bias": True}},
    "part of a tree": {"body": False, "head": True},
    "function": lambda name, leaf: name[0] == "head" and leaf.ndim > 0,
}


@pytest.mark.parametrize("trainable", CHOICES.values(), ids=CHOICES)
def test_all_ways_to_choose_select_the_same(trainable):
    expected, loop = make_loop(Linen(), "head"), make_loop(Linen(), trainable)
    assert [c.step for c in loop] == [c.step for c in expected]
    assert_trees_equal(loop.state, expected.state)


def test_a_tree_of_equinox_may_have_its_other_leaves():
    module = Equinox()
    mask = eqx.tree_at(lambda m: m.head.weight, jax.tree.map(lambda _: False, module), True)
    loop = make_loop(module, mask)
    assert trees.leaf_names(loop.state.params) == [("head", "weight")]
    labels = jax.tree.map(lambda _: "fast", eqx.filter(module, eqx.is_inexact_array))
    # A module is callable, and optax would call it: the labels are the result of a function.
    tx = optax.partition({"fast": optax.sgd(0.1)}, lambda _: labels)
    by_labels = make_loop(module, None, optimizer=tx)
    by_rate = make_loop(module, None, optimizer=optax.sgd(0.1))
    for loop in (by_labels, by_rate):
        list(loop)
    assert_trees_equal(by_labels.state.params, by_rate.state.params)


@pytest.mark.parametrize(
    "trainable",
    [
        nnx.PathContains("head"),
        lambda path, _: path[0] == "head",
        nnx.Not(nnx.PathContains("body")),
    ],
    ids=["path", "function", "not"],
)
def test_an_nnx_module_accepts_every_filter(trainable):
    loop = make_loop(Nnx(), trainable)
    assert {name[0] for name in trees.leaf_names(loop.state.params)} == {"head"}


def test_a_filter_may_select_variables_that_are_not_parameters():
    class Scale(nnx.Variable):
        pass

    class Scaled(Nnx):
        def __init__(self):
            super().__init__()
            self.scale = Scale(jnp.ones(()))

        def __call__(self, x):
            return super().__call__(x) * self.scale[...]

    loop = make_loop(Scaled(), Scale)
    list(loop)
    assert trees.leaf_names(loop.state.params) == [("scale",)]
    assert float(loop.model.scale[...]) != 1.0


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"accumulate": 4}, {"devices": 8}])
def test_it_combines_with_precision_parts_and_devices(options):
    if "devices" in options:
        options = {"devices": jax.devices()}
    loop = make_loop(Linen(), "head", **options)
    fixed = jax.device_get(loop.state.variables["untrained"])
    list(loop)
    assert_trees_equal(jax.device_get(loop.state.variables["untrained"]), fixed)
    assert loop.step == 4


def test_an_evaluation_of_the_module_itself_has_all_parameters():
    loop, module = make_loop(Linen(), "head"), Linen()
    task = tekoa.EvalTask(apply=module.apply, metrics={"loss": mse}, data=[(X, Y)])
    (*_, last) = map(tekoa.EvalLoop(task), loop)
    expected = mse(module.apply({"params": loop.model}, X), Y)
    assert last.metrics["eval"]["loss"] == pytest.approx(float(expected), rel=1e-6)


def test_a_resumed_run_computes_the_same_bits(tmp_path):
    whole = make_loop(Linen(), "head")
    list(whole)
    writer = tekoa.CheckpointFileWriter(tmp_path)
    writer(make_loop(Linen(), "head").next_checkpoint())
    writer.close()
    resumed = make_loop(tekoa.CheckpointFileReader(tmp_path, Linen()), "head")
    assert resumed.step == 2
    list(resumed)
    assert_trees_equal(resumed.state.params, whole.state.params)
    assert_trees_equal(resumed.state.variables, whole.state.variables)


@pytest.mark.parametrize(
    ("model", "trainable", "error", "message"),
    [
        (Linen, "tail", ValueError, "selects no parameter.*head/kernel"),
        (Linen, {"head": True}, NoRuleError, "body"),
        (Linen, {"head": "thaw", ".*": False}, ValueError, "'train' or 'freeze', got 'thaw'"),
        (Linen, {"head": {"kernel": True}}, ValueError, "no entry for parameter"),
        (Linen, (), TypeError, "trainable must be a pattern"),
        (Linen, nnx.LoRAParam, TypeError, "the model is Linen"),
        (Nnx, nnx.LoRA, ValueError, "selects no parameter"),
    ],
)
def test_a_choice_that_does_not_fit_is_refused(model, trainable, error, message):
    with pytest.raises(error, match=message):
        make_loop(model(), trainable)
