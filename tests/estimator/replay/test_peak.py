"""`tekoa why --memory`: what is in memory at the peak of a step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tekoa
from tekoa.estimator.cli import main


def large(x, w):
    return jnp.tanh(x[:, :, None] * w).sum(axis=2)  # The large array.


LINE = large.__code__.co_firstlineno + 1


def make_loop(read):
    rows = [(np.ones((8, 50), np.float32), np.ones((8, 50), np.float32))] * 4
    task = tekoa.TrainTask(
        apply=lambda params, x: large(x, params["w"]) + params["b"],
        optimizer=optax.adam(0.1),
        loss=lambda out, y: jnp.mean((out - y) ** 2),
        data=rows,
    )
    model = read({"w": jnp.ones(1000), "b": jnp.zeros(50)})
    return tekoa.TrainLoop(model, task, n_steps_per_checkpoint=2, rng=jax.random.key(5))


def test_the_largest_array_is_named_with_its_line(tmp_path):
    writer = tekoa.CheckpointFileWriter(tmp_path)
    for checkpoint in make_loop(lambda model: model):
        writer(checkpoint)
    writer.close()
    first, second, largest, *_ = tekoa.why(tmp_path, make_loop, memory=True).findings
    assert first.startswith("Before a step: parameters 4.2 kB, optimizer state 8.4 kB")
    assert "at the peak" in second
    assert "1.6 MB  float32[8,50,1000]" in largest
    assert f"{__file__}:{LINE}" in largest


def test_diagnosis_is_on_the_page(trained, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main.main(["why", str(trained), "--memory", f"--page={page}"]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("Before a step: parameters")
    assert f"<h2>Diagnosis</h2><pre>{line}" in page.read_text()
