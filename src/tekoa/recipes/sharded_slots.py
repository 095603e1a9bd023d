"""Optimizer state sharded over devices, parameters replicated: `optimizer_rules="data"`.

    python -m tekoa.recipes.sharded_slots --plot sharded_slots.png

Every device holds all parameters and its share of the optimizer state, which with Adam is twice
as large as the parameters. Results are the same as without sharding.
"""

import jax
import optax

import tekoa
from tekoa.recipes import toy

COUNTS = (1, 4, 8)


def run(n_steps: int = 30) -> toy.Curves:
    """Trains both models with their optimizer state on one to eight devices."""
    lines = {}
    for library, make in toy.MODELS.items():
        kilobytes = []
        for n_devices in COUNTS:
            loop = tekoa.TrainLoop(
                model=make(),
                task=toy.make_task(optax.adam(1e-2), batch_size=64),
                n_steps=n_steps,
                n_steps_per_checkpoint=n_steps,
                devices=jax.devices()[:n_devices],
                optimizer_rules="data",
            )
            (last,) = loop
            kilobytes.append(_kilobytes_per_device(loop.state.opt_state))
            params = _kilobytes_per_device(loop.state.params)
            print(
                f"{library}: {n_devices} devices, each with {params:.1f} kB of parameters and "
                f"{kilobytes[-1]:.1f} kB of optimizer state; loss {float(last.loss):.6f}"
            )
        lines[library] = kilobytes
    y_label = "optimizer state per device (kB)"
    return toy.Curves(lines=lines, x=COUNTS, x_label="devices", y_label=y_label)


def _kilobytes_per_device(tree: object) -> float:
    arrays = jax.tree.leaves(tree)
    return sum(array.addressable_shards[0].data.nbytes for array in arrays) / 1e3


if __name__ == "__main__":
    toy.main(run, __doc__, n_devices=max(COUNTS))
