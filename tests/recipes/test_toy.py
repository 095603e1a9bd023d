import jax
import numpy as np
import optax
import pytest

from support.processes import python
from tekoa.recipes import toy

pytestmark = pytest.mark.slow


def test_both_models_have_the_same_weight_names():
    image = np.zeros((2, 8, 8, 1), np.float32)
    linen = toy.LinenMLP().init(jax.random.key(0), image)["params"]
    shapes = {f"{a}/{b}": x.shape for a, layer in linen.items() for b, x in layer.items()}
    model = toy.NnxMLP()
    for name, shape in shapes.items():
        layer, kind = name.split("/")
        assert getattr(getattr(model, layer), kind)[...].shape == shape
    assert model(image).shape == (2, 10)


def test_digits_are_split_into_inputs_and_targets():
    task = toy.make_task(optax.sgd(0.1), batch_size=4)
    (image,), (label,) = task.split(next(iter(task.data)))
    assert image.shape == (4, 8, 8, 1)
    assert image.dtype == np.float32
    assert label.shape == (4,)
    assert float(toy.flatten(image).max()) <= 1.0


def test_curves_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    curves = toy.Curves(lines={"a": [1.0, 2.0], "b": [2.0, 1.0]}, x=[1, 2], y_label="loss")
    toy.draw(curves, str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_mistyped_flag_is_one_message():
    done = python("-m", "tekoa.recipes.ema", "--plt=x.png")
    assert done.returncode == 2
    assert "unrecognized arguments: --plt=x.png" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_recipes_run_as_commands(tmp_path):
    """All recipes share `main`, and their own tests run the rest. This one needs more devices."""
    words = ("-W", "error", "-m", "tekoa.recipes.sharded_slots")
    env = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = python(*words, cwd=tmp_path, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Linen: " in done.stdout
    assert "NNX: " in done.stdout
