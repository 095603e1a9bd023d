"""Several devices: meshes, and how arrays are divided over them."""

from tekoa import _lazy

__getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
