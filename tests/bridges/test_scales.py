import dataclasses

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import tekoa
from tekoa.bridges.any_model import as_model_fns
from tekoa.bridges.scales import find_scales
from tekoa.bridges.trainable import restrict
from tekoa.optim.scales import auto
from tekoa.optim.scales.roles import Role

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
BATCH = X, X[:, :3]


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="head")(nn.relu(nn.Dense(32, name="body")(x)))


class NnxModel(nnx.Module):
    def __init__(self):
        self.body = nnx.Linear(8, 32, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(32, 3, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.head(nnx.relu(self.body(x)))


class EquinoxModel(eqx.Module):
    params: dict

    def __call__(self, x):
        return forward(self.params, x)


def forward(params, x):
    x = jax.nn.relu(x @ params["body"]["kernel"] + params["body"]["bias"])
    return x @ params["head"]["kernel"] + params["head"]["bias"]


def init(rng, x):
    sizes = {"body": (x.shape[-1], 32), "head": (32, 3)}
    return {k: {"kernel": jnp.zeros(s), "bias": jnp.zeros(s[1])} for k, s in sizes.items()}


def haiku_forward(x):
    return hk.Linear(3, name="head")(jax.nn.relu(hk.Linear(32, name="body")(x)))


def loss(outputs, targets):
    return jnp.mean((outputs - targets) ** 2)


MODELS = {
    "linen": lambda: (LinenModel(), None),
    "nnx": lambda: (NnxModel(), None),
    "equinox": lambda: (EquinoxModel(init(None, X)), None),
    "haiku": lambda: (hk.transform(haiku_forward), None),
    "functions": lambda: (init, forward),
    "parameters": lambda: (init(None, X), forward),
    "model_fns": lambda: (as_model_fns(init, forward), None),
}


def rows_by_layer(table):
    """Returns the numbers of each row under a name that does not depend on the library."""
    words = {"w": "kernel", "b": "bias"}  # As Haiku names them.
    return {
        (row.name[-2], words.get(row.name[-1], row.name[-1])): (row.eta, row.slot_shape, row.reason)
        for row in table
    }


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_every_library_gives_the_same_table(make):
    model, apply = make()
    table = find_scales(model, loss, BATCH, apply=apply)
    expected = auto.scales_of_function(
        lambda params, x, y: loss(forward(params, x), y), init(None, X), *BATCH
    )
    assert rows_by_layer(table) == rows_by_layer(expected)
    assert not table.unplaced


@pytest.mark.parametrize("trained", ["body", "head"])
def test_what_is_not_trained_has_no_row_but_counts_for_the_others(trained):
    full = find_scales(LinenModel(), loss, BATCH)
    table = find_scales(restrict(as_model_fns(LinenModel()), trained), loss, BATCH)
    assert list(table) == [row for row in full if row.name[0] == trained]
    assert table.depth == full.depth


def test_the_table_fits_the_parameters_of_the_train_loop():
    table = find_scales(NnxModel(), loss, BATCH)
    task = tekoa.TrainTask(
        optimizer=tekoa.amos(0.1, table.eta_fn, table.shape_fn), loss=loss, data=[BATCH] * 2
    )
    (checkpoint,) = tekoa.TrainLoop(NnxModel(), task, n_steps=2)
    assert checkpoint.step == 2


def test_split_selects_the_inputs_and_targets_of_a_batch():
    batch = {"image": X, "label": X[:, :3]}
    split = lambda batch: ((batch["image"],), (batch["label"],))
    table = find_scales(LinenModel(), loss, batch, split=split)
    assert str(table) == str(find_scales(LinenModel(), loss, BATCH))


def test_variables_do_not_count_as_parameters():
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool):
            return nn.Dense(3)(nn.BatchNorm(use_running_average=not train)(x))

    table = find_scales(Normed(), loss, BATCH)
    assert {row.name[0] for row in table} == {"BatchNorm_0", "Dense_0"}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_every_library_accepts_shapes_and_has_the_same_roles(make):
    model, apply = make()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), BATCH)
    table = find_scales(model, loss, shapes, apply=apply)
    roles = {row.name[-2][-4:]: row.role for row in table if len(row.shape) == 2}
    body = Role(kind="contracted", contracted=(0,), free=(1,))
    assert roles == {"body": body, "head": dataclasses.replace(body, is_output=True)}


def test_model_that_returns_its_loss():
    apply = lambda params, x: loss(forward(params, x), x[:, :3])
    table = find_scales(init, None, (X, ()), apply=apply)
    assert table["head/kernel"].role.is_output


def test_a_model_that_no_process_could_hold_is_read_from_shapes():
    n = 2**16  # The kernel would take 16 GB.

    def init(rng, x):
        return {"w": jax.random.normal(rng, (n, n)), "v": jax.random.normal(rng, (n, 2))}

    def apply(params, x):
        return jax.nn.relu(x @ params["w"]) @ params["v"]

    def mse(y, target):
        return jnp.mean((y - target) ** 2)

    batch = np.ones((2, n), np.float32), np.zeros((2, 2), np.float32)
    table = find_scales(init, mse, batch, apply=apply)
    assert table["w"].eta == pytest.approx(n**-0.5, rel=0.1)
    assert [row.role.is_output for row in table] == [True, False]
