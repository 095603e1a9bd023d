"""The models, losses and optimizers of the original cookbook train in a `TrainLoop`.

The cookbook is not part of the project: without it beside the checkout there is nothing to run.
"""

import logging
import re

import jax
import numpy as np
import optax
import pytest

import tekoa
from support import files
from tekoa.core import trees
from tekoa.testing import assert_trees_equal

COOKBOOK = files.original("nnx_cookbook.md")
N_STEPS = 3

pytestmark = pytest.mark.skipif(
    not COOKBOOK.exists(), reason=f"no original cookbook in {COOKBOOK.parent}"
)


@pytest.fixture(scope="module")
def book():
    """The names that the first blocks of the cookbook define."""
    names = {}
    for text in blocks()[:2]:
        # The number of devices is that of the tests; nothing is plotted.
        lines = [x for x in text.splitlines() if not re.search("num_cpu_devices|matplotlib", x)]
        exec("\n".join(lines), names)
    names["optax"] = optax
    return names


def blocks():
    return re.findall(r"^```python\n(.*?)^```", COOKBOOK.read_text(), re.DOTALL | re.MULTILINE)


def block(book, word):
    """Returns the names of the block that contains a word, after its first lines ran.

    Its training loop is left out: it is what `TrainLoop` does instead.
    """
    (text,) = (b for b in blocks() if word in b and "matplotlib" not in b)
    names = dict(book)
    exec(re.split(r"^@nnx.jit|^losses|^def train_step|^nnx.display", text, flags=re.M)[0], names)
    return names


def by_hand(book, module, optimizer, *, n_steps=N_STEPS):
    """Trains as the cookbook does and returns the losses."""
    nnx, loss_fn = book["nnx"], book["loss_fn"]

    @nnx.jit
    def train_step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
        optimizer.update(model, grads)
        return loss

    return [float(train_step(module, optimizer, book["x"], book["y"])) for _ in range(n_steps)]


def make_loop(book, module, optimizer, *, trainable=None, every=1, **options):
    # The original's loss takes the model; given its output it is the same sum.
    def loss(outputs, y):
        return book["loss_fn"](lambda _: outputs, None, y)

    batches = [(np.asarray(book["x"]), np.asarray(book["y"]))] * N_STEPS
    task = tekoa.TrainTask(optimizer=optimizer, loss=loss, data=batches, trainable=trainable)
    return tekoa.TrainLoop(module, task, n_steps=N_STEPS, n_steps_per_checkpoint=every, **options)


def losses_of(loop):
    return [float(checkpoint.loss) for checkpoint in loop]


@pytest.mark.parametrize("n_parts", [1, 4])
def test_accumulation_of_its_sum_is_the_full_batch(book, n_parts):
    nnx = book["nnx"]
    module = book["make_model"](nnx.Rngs(0))
    loop = make_loop(book, nnx.clone(module), optax.adam(1e-3), accumulate=n_parts)
    optimizer = nnx.Optimizer(module, optax.adam(1e-3), wrt=nnx.Param)
    np.testing.assert_allclose(losses_of(loop), by_hand(book, module, optimizer), rtol=1e-5)


@pytest.mark.parametrize("choose", [lambda nnx: nnx.LoRA, lambda nnx: nnx.LoRAParam])
def test_only_the_adapters_of_its_model_are_trained(book, choose):
    nnx = book["nnx"]
    module = block(book, "add_rank2_lora")["lora_model"]
    loop = make_loop(book, module, optax.adam(1e-3), trainable=choose(nnx))
    before = nnx.to_pure_dict(nnx.state(module))
    losses = losses_of(loop)
    names = {name[-1] for name in trees.leaf_names(loop.state.params)}
    assert names == {"lora_a", "lora_b"}
    slots = {name[-1] for name in trees.leaf_names(loop.state.opt_state)} - {"count"}
    assert slots == names
    after = nnx.to_pure_dict(nnx.state(loop.model))
    for name, leaf in trees.named_leaves(after).items():
        is_same = np.array_equal(leaf, trees.named_leaves(before)[name])
        assert is_same == ("base_module" in name), name
    optimizer = nnx.Optimizer(module, optax.adam(1e-3), wrt=nnx.LoRAParam)
    np.testing.assert_allclose(losses, by_hand(book, module, optimizer), rtol=1e-5)


def test_its_optimizer_brings_its_filter(book):
    names = block(book, "add_rank2_lora")
    optimizer = book["nnx"].Optimizer(
        names["lora_model"], tx=optax.adam(1e-3), wrt=book["nnx"].LoRAParam
    )
    loop = make_loop(book, names["lora_model"], optimizer)
    assert {name[-1] for name in trees.leaf_names(loop.state.params)} == {"lora_a", "lora_b"}
    losses = losses_of(loop)
    np.testing.assert_allclose(losses, by_hand(book, names["lora_model"], optimizer), rtol=1e-5)


def test_adapters_without_a_word_about_them_are_one_line(book, caplog):
    names = block(book, "add_rank2_lora")
    with caplog.at_level(logging.WARNING, logger="tekoa"):
        make_loop(book, names["lora_model"], optax.adam(1e-3))
        make_loop(book, book["make_model"](book["nnx"].Rngs(0)), optax.adam(1e-3))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "trainable=nnx.LoRA" in line


def test_its_rates_by_labels_of_the_state(book):
    names = block(book, "optax.partition")
    tx = names["optimizer"].tx
    loop = make_loop(book, book["nnx"].clone(names["model"]), tx)
    losses = losses_of(loop)
    np.testing.assert_allclose(losses, by_hand(book, names["model"], names["optimizer"]), rtol=1e-5)
    assert_trees_equal(
        trees.named_leaves(loop.state.params),
        trees.named_leaves(book["nnx"].state(names["model"], book["nnx"].Param)),
    )


@pytest.mark.parametrize(
    "options", [{}, {"grads": True}, {"steps_per_dispatch": 2, "accumulate": 2, "ema": 0.9}]
)
def test_its_explicit_mesh_splits_the_slots_alone(book, options):
    nnx = book["nnx"]
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=kinds)
    layout = tekoa.Layout(mesh=mesh, batch_axes=("x", "y"), optimizer_rules={"kernel": ("x", "y")})
    module = book["make_model"](nnx.Rngs(0))
    loop = make_loop(
        book, nnx.clone(module), optax.adam(1e-3), layout=layout, every=N_STEPS, **options
    )
    (loss,) = losses_of(loop)
    optimizer = nnx.Optimizer(module, optax.adam(1e-3), wrt=nnx.Param)
    assert loss == pytest.approx(by_hand(book, module, optimizer)[-1], rel=1e-5)
    mu = loop.state.opt_state[0].mu["layers"][0]["kernel"]
    assert mu.sharding.spec == jax.P("x", "y")
    assert loop.state.params["layers"][0]["kernel"].sharding.spec == jax.P()


def test_its_average_is_the_averaged_model(book):
    nnx = book["nnx"]
    names = block(book, "class Ema")
    module, ema = names["model"], names["ema"]
    loop = make_loop(book, nnx.clone(module), optax.adam(1e-3), ema=0.9)
    for _ in range(N_STEPS):
        by_hand(book, module, names["optimizer"], n_steps=1)
        ema.update(module)
    losses_of(loop)
    for model, expected in ((loop.model, module), (loop.averaged_model, ema.ema)):
        np.testing.assert_allclose(
            model.layers[0].kernel[...], expected.layers[0].kernel[...], rtol=1e-6
        )
