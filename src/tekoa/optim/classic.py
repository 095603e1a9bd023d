"""Short name for the classic optimizers of `tekoa.optim.triples`."""

from tekoa.optim.triples.classic import *  # noqa: F403
