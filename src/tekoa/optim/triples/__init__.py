"""Optimizers as `(init, update, get_params)` triples, and conversion to and from optax."""

from tekoa.optim.triples.convert import from_triple as from_triple
from tekoa.optim.triples.convert import to_triple as to_triple
