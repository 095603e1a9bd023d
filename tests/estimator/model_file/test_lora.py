import flax.linen as nn
import jax
import ml_collections
import numpy as np
import pytest

import tekoa
from tekoa.core import trees
from tekoa.estimator.cli import main
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.model_file import lora

pytestmark = pytest.mark.slow

X = np.ones((2, 4), np.float32)
MODEL = nn.Dense(3)


def config(**changes):
    return ml_collections.ConfigDict({"lora": {**lora.settings(), **changes}})


def test_rank_zero_returns_the_model_itself():
    assert lora.adapted(MODEL, config(), X) is MODEL
    assert lora.adapted(MODEL, ml_collections.ConfigDict(), X) is MODEL


@pytest.mark.parametrize("with_average", [False, True])
def test_the_base_is_loaded_from_a_checkpoint(tmp_path, with_average):
    """The average of the parameters, if the checkpoint contains one."""
    trained = {"kernel": np.full((4, 3), 2.0, np.float32), "bias": np.ones(3, np.float32)}
    average = {"kernel": np.full((4, 3), 3.0, np.float32), "bias": np.zeros(3, np.float32)}
    items = {"model_params": trained, "average": average if with_average else None}
    with tekoa.store.Store(tmp_path) as store:
        store.save(1, items)
    fns = lora.adapted(MODEL, config(rank=1, base=str(tmp_path)), (X,))
    params, variables = fns.init(jax.random.key(0), (X,))
    tekoa.testing.assert_trees_equal(
        jax.device_get(variables["frozen"]), average if with_average else trained
    )
    assert trees.n_elements(params) == 4 + 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 4}, "lora.rank: rank=4 is too large for parameter 'kernel'"),
        ({"rank": -1}, "lora.rank: rank must be"),
        ({"rank": 1, "where": "weight"}, "lora.rank: Pattern 'weight'.*bias, kernel"),
        (
            {"rank": 1, "base": "no_such_directory"},
            "lora.rank: no_such_directory: contains no checkpoint",
        ),
    ],
)
def test_mistakes_name_the_setting(changes, message):
    with pytest.raises(UsageError, match=message):
        lora.adapted(MODEL, config(**changes), X)


@pytest.mark.slow
def test_a_language_model_is_adapted_by_the_command(tmp_path, capsys):
    """Train, adapt with rates by group, evaluate; the base stays bit-for-bit the same."""
    common = [
        "transformer_lm",
        "--module_config.width=16",
        "--module_config.n_layers=1",
        "--module_config.n_heads=2",
        "--train_batch_size=4",
    ]
    steps = ["--max_train_steps=2", "--check_every_steps=2", "--noprogress"]
    base, adapted = tmp_path / "base", tmp_path / "adapted"
    assert main.main(["train", *common, *steps, f"--model_dir={base}"]) == 0
    more = [f"--model_dir={adapted}", "--module_config.lora.rank=2"]
    options = [
        f"--module_config.lora.base={base}",
        "--module_config.opt_config.optimizer=adam",
        "--module_config.opt_config.groups=lora_b$=0.1",
    ]
    assert main.main(["train", *common, *steps, *more, *options]) == 0
    before, after = (tekoa.load_checkpoint(path) for path in (base, adapted))
    tekoa.testing.assert_trees_equal(after["model_state"]["frozen"], before["model_params"])
    assert {name[-1] for name in trees.leaf_names(after["model_params"])} == {"lora_a", "lora_b"}
    capsys.readouterr()
    assert main.main(["eval", "transformer_lm", f"--model_dir={adapted}"]) == 0
    printed = capsys.readouterr()
    assert "perplexity at step 2" in printed.out
    assert "n_heads=2, lora.rank=2" in printed.err
