"""Low-rank adaptation: `lora(model, rank=4, where="kernel$")`.

    python -m tekoa.recipes.lora --plot lora.png

A network trained on digits learns to read them upside down with adapters of rank 4. The base
weights do not change; the adapters are saved separately, or merged into plain weights.
"""

import tempfile
from typing import Any

import optax

import tekoa
from tekoa.recipes import toy

EVERY = 20


def split_upside_down(batch: Any) -> Any:
    """Returns the digits upside down, and their labels."""
    (image,), labels = toy.split_batch(batch)
    return (image[:, ::-1, ::-1],), labels


def run(n_steps: int = 300) -> toy.Curves:
    """Trains a base model, then adapts it to another task."""
    lines = {}
    for library, make in toy.MODELS.items():
        base_loop = tekoa.TrainLoop(make(), toy.make_task(optax.adam(3e-3)), n_steps=n_steps)
        list(base_loop)
        options: Any = {"rank": 4, "where": "kernel$", "base": base_loop.state.params}

        task = toy.make_task(optax.adam(1e-2), split=split_upside_down)
        loop = tekoa.TrainLoop(
            tekoa.lora(make(), **options), task, n_steps=n_steps, n_steps_per_checkpoint=EVERY
        )
        evaluate = toy.make_evaluation(loop)
        frozen = loop.state.variables["frozen"]
        history = [evaluate(checkpoint).metrics["eval"] for checkpoint in loop]
        tekoa.testing.assert_trees_equal(loop.state.variables["frozen"], frozen)
        lines[library] = [metrics["loss"] for metrics in history]
        print(f"{library}: accuracy on rotated digits {history[-1]['accuracy']:.3f}")
        print(f"  trainable numbers: {loop.checkpoint().setup['n_weights']}; base unchanged")

        adapters = save_and_load(loop)
        restored = tekoa.TrainLoop(tekoa.lora(make(), **options, adapters=adapters), task)
        metrics = evaluate(restored.checkpoint()).metrics["eval"]
        print(f"  accuracy with saved adapters: {metrics['accuracy']:.3f}")
        plain = tekoa.TrainLoop(merged_model(loop, library), task)
        metrics = toy.make_evaluation(plain)(plain.checkpoint()).metrics["eval"]
        print(f"  accuracy with merged weights: {metrics['accuracy']:.3f}")
    steps = range(EVERY, n_steps + 1, EVERY)
    return toy.Curves(lines=lines, x=steps, y_label="test loss on rotated digits", is_log=True)


def save_and_load(loop: tekoa.TrainLoop) -> Any:
    """Saves the adapters alone, and loads them again."""
    with tempfile.TemporaryDirectory() as directory:
        with tekoa.store.Store(directory) as store:
            store.save(loop.step, {"model_params": loop.state.params})
        return tekoa.load_checkpoint(directory)["model_params"]


def merged_model(loop: tekoa.TrainLoop, library: str) -> Any:
    """Returns the model without adapters: for NNX a module, for Linen its functions."""
    if library == "NNX":
        return loop.model
    return tekoa.as_model_fns(
        loop.model, lambda params, image: toy.LinenMLP().apply({"params": params}, image)
    )


if __name__ == "__main__":
    toy.main(run, __doc__)
