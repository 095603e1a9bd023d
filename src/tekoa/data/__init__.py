"""Opens data and turns it into batches in a reproducible, resumable order."""

from tekoa import _lazy

__getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
