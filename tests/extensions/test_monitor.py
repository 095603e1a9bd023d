import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa.extensions import monitor
from tekoa.extensions.monitor import Monitor
from tekoa.loop.task import TrainTask
from tekoa.loop.train import TrainLoop


def make_loop(data, **options):
    task = TrainTask(
        apply=lambda p, x: x.astype(jnp.float32) @ p["w"],
        optimizer=optax.sgd(0.5),
        loss=lambda y, t: ((y - t) ** 2).mean(),
        data=data,
    )
    return TrainLoop({"w": jnp.ones((4, 2))}, task, n_steps_per_checkpoint=2, **options)


TOKENS = [(np.ones((8, 4), np.int32), np.ones((8, 2), np.float32))] * 4


@pytest.mark.parametrize("n_devices", [1, 4])
def test_rates_and_utilisation_follow_from_steps_and_time(n_devices):
    loop = make_loop(TOKENS, **({} if n_devices == 1 else {"devices": jax.devices()[:n_devices]}))
    stage = Monitor(loop, peak_flops=1e6)
    checkpoint = loop.next_checkpoint()
    system = stage(checkpoint).metrics["system"]
    rate = 2 / (checkpoint.elapsed_time - checkpoint.compile_time)
    assert system["examples_per_second"] == pytest.approx(8 * rate)
    assert system["tokens_per_second"] == pytest.approx(8 * 4 * rate)
    # Forwards 8 x 4 x 2 products, and as many for the gradient of w; the norms of both are
    # products too. Each counts twice.
    n_flops = 2 * (2 * 8 * 4 * 2 + 2 * 8)
    assert system["flops_utilisation"] == pytest.approx(n_flops * rate / (1e6 * n_devices))
    assert system["steps_seconds"] == checkpoint.elapsed_time
    assert 0 < system["data_seconds"] <= system["steps_seconds"]
    assert system["host_bytes"] > 1e6


def test_timed_stages_are_summed_up_and_start_over():
    loop = make_loop(TOKENS)
    stage = Monitor(loop)
    save = stage.timed("save", lambda checkpoint: checkpoint)
    checkpoint = loop.next_checkpoint()
    assert save(checkpoint) is checkpoint
    assert stage(checkpoint).metrics["system"]["save_seconds"] > 0
    assert stage(checkpoint).metrics["system"]["save_seconds"] == 0


def test_numbers_are_no_tokens_and_a_peak_that_is_not_known_no_utilisation():
    loop = make_loop([(x.astype(np.float32), y) for x, y in TOKENS])
    system = Monitor(loop)(loop.next_checkpoint()).metrics["system"]
    assert "tokens_per_second" not in system
    assert "flops_utilisation" not in system


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("cpu", 0),
    ],
)
def test_the_peak_of_a_device_is_found_by_its_name(monkeypatch, kind, peak):
    device = types.SimpleNamespace(device_kind=kind)
    monkeypatch.setattr(monitor.jax, "devices", lambda: [device])
    assert monitor._peak_flops() == peak


def test_norms_are_those_of_the_last_step():
    loop = make_loop(TOKENS, grads="norms")
    before = loop.next_step().model_params["w"]
    checkpoint = loop.next_step()
    after = checkpoint.model_params["w"]
    assert checkpoint.grads is None
    norms = {kind: checkpoint.metrics[f"{kind}_norms"]["w"] for kind in ("gradient", "update")}
    assert norms["update"] == pytest.approx(np.linalg.norm(after - before), rel=1e-5)
    assert norms["gradient"] == pytest.approx(norms["update"] / 0.5, rel=1e-5)
    assert checkpoint.metrics["param_norms"]["w"] == pytest.approx(np.linalg.norm(after), rel=1e-5)
