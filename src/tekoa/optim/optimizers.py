"""The names of `jax.example_libraries.optimizers`, defined in `tekoa.optim.triples`."""

from tekoa.optim.triples.classic import *  # noqa: F403
