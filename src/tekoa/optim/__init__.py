"""Optimizers: Amos and its scales, the classic triples, parameter groups and rates."""

from tekoa import _lazy

__getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
