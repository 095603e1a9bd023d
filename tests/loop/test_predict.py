import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tekoa
from tekoa.loop.predict import predictions


def test_outputs_are_those_of_the_evaluation_parameters():
    fns = tekoa.as_model_fns({"w": jnp.float32(2.0)}, lambda params, x: x * params["w"])
    inputs = (np.zeros(1, np.float32),)
    state = tekoa.init_state(fns, optax.sgd(0.1), jax.random.key(0), inputs=inputs, ema=0.5)
    state = state.replace(average={"w": jnp.float32(3.0)})
    batches = [(np.float32([1, 2]), ()), (np.float32([4]), ())]
    outputs = list(predictions(fns, state, batches))
    assert [np.asarray(x).tolist() for x in outputs] == [[3.0, 6.0], [12.0]]
    stop = threading.Event()
    stop.set()
    assert list(predictions(fns, state, batches, stop_flag=stop)) == []
