import itertools

import jax
import numpy as np
import pytest

from tekoa import random


@pytest.mark.parametrize("seed", [3, np.int64(3), jax.random.key(3)])
def test_keys_are_distinct_and_determined_by_the_seed(seed):
    first, second = (
        [tuple(jax.random.key_data(key).tolist()) for key in itertools.islice(keys, 20)]
        for keys in (random.sequence(seed), random.sequence(3))
    )
    assert len(set(first)) == 20
    assert first == second
