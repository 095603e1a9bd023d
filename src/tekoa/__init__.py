"""Tekoa: training on JAX, from a pure step to one command.

The public names are listed in `__init__.pyi`. Each is imported when it is first used, so that
`import tekoa` costs next to nothing.
"""

from tekoa import _lazy

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
