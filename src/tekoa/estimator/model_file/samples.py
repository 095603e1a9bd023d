"""The stage of `--sample_every`: text that a language model writes during training."""

import functools

from tekoa.estimator.cli.flags import RunConfig, UsageError
from tekoa.estimator.model_file.program import Program
from tekoa.extensions.generation.samples import TextSamples
from tekoa.extensions.serial import Stage
from tekoa.loop.checkpoint import Checkpoint
from tekoa.loop.train import TrainLoop


def check_flags(config: RunConfig) -> None:
    """Rejects flags of samples that contradict others.

    Raises:
        UsageError: It names the flag.
    """
    every = config.sample_every
    if every is None:
        names = ("sample_prompt", "sample_tokens", "sample_temperature", "sample_top_p")
        if unused := [name for name in names if name in config.set_flags]:
            raise UsageError(f"--{unused[0]} needs --sample_every=STEPS.")
    elif every % config.check_every_steps:
        raise UsageError(
            f"--sample_every={every} must be a multiple of --check_every_steps="
            f"{config.check_every_steps}: samples belong to checkpoints."
        )


def sample_stage(config: RunConfig, program: Program, loop: TrainLoop) -> Stage | None:
    """Returns the stage that adds samples to checkpoints; None if none are requested.

    Args:
        config: The flags.
        program: The model file.
        loop: The loop of its model.

    Raises:
        UsageError: If the model cannot write text, or the prompt cannot be encoded.
    """
    every = config.sample_every
    if every is None:
        return None
    text = program.text_fns()
    if text is None:
        raise UsageError(
            "--sample_every: the model file does not say how its model reads and writes text. Set "
            "`text` of its Experiment to a TextFns."
        )
    try:
        samples = TextSamples(
            loop.model_fns,
            text,
            prompt=config.sample_prompt,
            n_tokens=config.sample_tokens,
            temperature=config.sample_temperature,
            top_p=config.sample_top_p,
            layout=loop.layout,
            write=functools.partial(print, flush=True),
        )
    except ValueError as error:
        raise UsageError(f"--sample_every: {error}") from None

    def stage(checkpoint: Checkpoint) -> Checkpoint:
        # The same steps, whether the run was stopped in between or not.
        is_due = checkpoint.step % every == 0 or checkpoint.step == loop.n_steps
        return samples(checkpoint) if is_due else checkpoint

    return stage
