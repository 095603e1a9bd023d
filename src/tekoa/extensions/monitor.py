"""Monitor: adds speed, utilisation, memory and where the time goes to the metrics.

All of it is in the group "system". Nothing is computed on the device, and nothing between
checkpoints.
"""

import functools
import os
import pathlib
import time
from typing import Any

import jax

from tekoa import hosts
from tekoa.extensions.serial import Stage
from tekoa.loop.checkpoint import Checkpoint, Summary, as_summary
from tekoa.loop.flops import count_flops
from tekoa.loop.train import TrainLoop

GROUP = "system"

# Peak operations per second in bfloat16, without sparsity, as published by the makers. The longest
# prefix of a device's name counts.
PEAK_FLOPS = {
    "TPU v3": 123e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L40S": 362e12,
    "Tesla V100": 125e12,
    "Tesla T4": 65e12,
}


class Monitor:
    """Adds the group "system" to the metrics of a checkpoint; a stage for `serial`.

    The group has `examples_per_second`; `tokens_per_second` if the model's input is text;
    `flops_utilisation`, the share of the devices' peak that the products of the model use, if the
    peak is known; `host_bytes`, `device_bytes`, `device_peak_bytes`; and the seconds since the
    previous checkpoint that training (`steps_seconds`), reading batches (`data_seconds`, a part of
    the former), compiling (`compile_seconds`, another) and the stages wrapped by `timed` took.
    Rates are those of the steps alone.

    Args:
        loop: The loop that yields the checkpoints.
        peak_flops: Most operations per second of one device; by default that of a known device.
    """

    def __init__(self, loop: TrainLoop, *, peak_flops: float | None = None):
        self._peak = _peak_flops() if peak_flops is None else peak_flops
        self._flops = functools.cache(lambda: _flops_per_device(loop))
        self._seconds: dict[str, float] = {}

    def __call__(self, checkpoint: Checkpoint) -> Summary:
        """Adds the figures of one checkpoint; those of timed stages run since the last one."""
        values: dict[str, float] = {}
        seconds = checkpoint.elapsed_time - checkpoint.compile_time
        if checkpoint.n_completed_steps and seconds > 0:
            rate = checkpoint.n_completed_steps / seconds
            values = {
                f"{kind}_per_second": checkpoint.setup[key] * rate
                for kind, key in (("examples", "n_rows"), ("tokens", "n_tokens"))
                if checkpoint.setup.get(key)
            }
            if self._peak:
                values["flops_utilisation"] = self._flops() * rate / self._peak
            values["steps_seconds"] = checkpoint.elapsed_time
            values["compile_seconds"] = checkpoint.compile_time
            values["data_seconds"] = checkpoint.data_time
        values |= {f"{name}_seconds": seconds for name, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return as_summary(checkpoint).with_metrics(GROUP, values | _memory())

    def timed(self, name: str, stage: Stage) -> Stage:
        """Returns a stage that adds its time to `NAME_seconds`.

        A stage that comes after the monitor, such as the writer, is reported with the next
        checkpoint.
        """

        def run(checkpoint: Any) -> Any:
            began = time.perf_counter()
            try:
                return stage(checkpoint)
            finally:
                passed = time.perf_counter() - began
                self._seconds[name] = self._seconds.get(name, 0.0) + passed

        return run


def _peak_flops() -> float:
    kind = jax.devices()[0].device_kind
    return PEAK_FLOPS.get(max(filter(kind.startswith, PEAK_FLOPS), key=len, default=""), 0.0)


def _flops_per_device(loop: TrainLoop) -> float:
    """Returns the operations of one step, for each device of the loop; 0 if the data has ended."""
    try:
        batch = loop.peek_batch()
    except ValueError:
        return 0.0
    n_devices = len(loop.state.step.sharding.device_set)
    return count_flops(loop.pure_step(), loop.state, batch) * hosts.current().count / n_devices


def _memory() -> dict[str, float]:
    values = {}
    if rss := _resident_bytes():
        values["host_bytes"] = float(rss)
    stats = [device.memory_stats() for device in jax.local_devices()]
    for name, key in (("device_bytes", "bytes_in_use"), ("device_peak_bytes", "peak_bytes_in_use")):
        sizes = [stat[key] for stat in stats if stat and key in stat]
        if sizes:
            values[name] = float(max(sizes))
    return values


def _resident_bytes() -> int:
    try:
        n_pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return n_pages * os.sysconf("SC_PAGE_SIZE")
