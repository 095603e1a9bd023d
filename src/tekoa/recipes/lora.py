"""Low-rank adaptation: `lora(model, rank=4, where="kernel$")`.

    python -m tekoa.recipes.lora --plot lora.png

A network that reads digits learns to read them upside down by adapters of rank 4. The base keeps
every bit; the adapters are saved alone, and merge into plain weights.
"""

import tempfile
from typing import Any

import optax

import tekoa
from tekoa.recipes import toy

EVERY = 20


def turned(batch: Any) -> Any:
    """Digits upside down, and their labels."""
    (image,), labels = toy.as_pair(batch)
    return (image[:, ::-1, ::-1],), labels


def run(n_steps: int = 300) -> toy.Curves:
    """Trains a base, then adapts it to another task."""
    lines = {}
    for library, make in toy.MODELS.items():
        first = tekoa.TrainLoop(make(), toy.make_task(optax.adam(3e-3)), n_steps=n_steps)
        list(first)
        options: Any = {"rank": 4, "where": "kernel$", "base": first.state.params}

        task = toy.make_task(optax.adam(1e-2), split=turned)
        loop = tekoa.TrainLoop(
            tekoa.lora(make(), **options), task, n_steps=n_steps, n_steps_per_checkpoint=EVERY
        )
        measure = toy.make_evaluation(loop, turned)
        frozen = loop.state.variables["frozen"]
        found = [measure(checkpoint).metrics["eval"] for checkpoint in loop]
        tekoa.testing.assert_trees_equal(loop.state.variables["frozen"], frozen)
        lines[library] = [metrics["loss"] for metrics in found]
        print(f"{library}: accuracy on turned digits {found[-1]['accuracy']:.3f}")
        print(f"  learned: {loop.checkpoint().setup['n_weights']} numbers; the base is as it was")

        adapters = saved_and_loaded(loop)
        again = tekoa.TrainLoop(tekoa.lora(make(), **options, adapters=adapters), task)
        print(f"  of saved adapters: {measure(again.checkpoint()).metrics['eval']['accuracy']:.3f}")
        plain = tekoa.TrainLoop(merged_model(loop, library), task)
        result = toy.make_evaluation(plain, turned)(plain.checkpoint()).metrics["eval"]
        print(f"  of merged weights: {result['accuracy']:.3f}")
    steps = range(EVERY, n_steps + 1, EVERY)
    return toy.Curves(lines=lines, x=steps, y_label="test loss on turned digits", is_log=True)


def saved_and_loaded(loop: tekoa.TrainLoop) -> Any:
    """Adapters that went through files, alone."""
    with tempfile.TemporaryDirectory() as directory:
        with tekoa.store.Store(directory) as store:
            store.save(loop.step, {"model_params": loop.state.params})
        return tekoa.load_checkpoint(directory)["model_params"]


def merged_model(loop: tekoa.TrainLoop, library: str) -> Any:
    """A model without adapters: a plain module for NNX, plain parameters for Linen."""
    if library == "NNX":
        return loop.model
    return tekoa.as_model_fns(
        loop.model, lambda params, image: toy.LinenMLP().apply({"params": params}, image)
    )


if __name__ == "__main__":
    toy.main(run, __doc__)
