"""How models of each library are run."""

import equinox as eqx
import jax
import jax.numpy as jnp
import plain_model
import pytest
from flax import linen as nn
from flax import nnx

from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.eject.libraries import library_of

INPUTS = (jnp.ones((2, 3)),)


def test_linen_passes_what_its_call_accepts():
    library = library_of(plain_model.Linen(), INPUTS, "f(batch)", has_variables=True)
    assert "train=True" in library.forward
    assert "mutable=[*variables]" in library.forward
    assert library.uses_key


def test_model_without_dropout_needs_no_key():
    library = library_of(nn.Dense(2), INPUTS, "f(batch)", has_variables=False)
    assert library.forward == 'outputs = model.apply({"params": params}, f(batch))'
    assert not library.uses_key


def test_modules_with_state_are_split():
    library = library_of(plain_model.Nnx(nnx.Rngs(0)), INPUTS, "f(batch)", has_variables=True)
    assert "VARIABLES" in library.before
    library = library_of(
        eqx.nn.Linear(3, 2, key=jax.random.key(0)), INPUTS, "f(batch)", has_variables=False
    )
    assert "eqx.partition" in library.before
    assert library.uses_key


def test_other_models_are_refused():
    with pytest.raises(UsageError, match="type int cannot be ejected"):
        library_of(3, INPUTS, "f(batch)", has_variables=False)
