"""One command around a model file, and the parts of such a file."""

from tekoa import _lazy

__getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
