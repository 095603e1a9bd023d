"""Optimizer state split over devices, parameters whole: `optimizer_rules="data"`.

    python -m tekoa.recipes.sharded_slots --plot sharded_slots.png

Every device holds all parameters and its share of the slots, which take twice the memory of the
parameters with Adam. Results are those of whole slots.
"""

import jax
import optax

import tekoa
from tekoa.recipes import toy

COUNTS = (1, 4, 8)


def run(n_steps: int = 30) -> toy.Curves:
    """Trains both models with slots on one to eight devices."""
    lines = {}
    for library, make in toy.MODELS.items():
        held = []
        for n_devices in COUNTS:
            loop = tekoa.TrainLoop(
                make(),
                toy.make_task(optax.adam(1e-2), batch_size=64),
                n_steps=n_steps,
                n_steps_per_checkpoint=n_steps,
                devices=jax.devices()[:n_devices],
                optimizer_rules="data",
                grads=False,
            )
            (last,) = loop
            held.append(_kilobytes_of_a_device(loop.state.opt_state))
            params = _kilobytes_of_a_device(loop.state.params)
            print(
                f"{library}: {n_devices} devices, each with {params:.1f} kB of parameters and "
                f"{held[-1]:.1f} kB of slots; loss {float(last.loss):.6f}"
            )
        lines[library] = held
    return toy.Curves(lines=lines, x=COUNTS, x_label="devices", y_label="kB of slots on each")


def _kilobytes_of_a_device(tree: object) -> float:
    arrays = jax.tree.leaves(tree)
    return sum(array.addressable_shards[0].data.nbytes for array in arrays) / 1e3


if __name__ == "__main__":
    toy.main(run, __doc__, n_devices=max(COUNTS))
