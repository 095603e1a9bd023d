"""Checks that users can run on their own models and steps.

The public names are listed in `__init__.pyi`.
"""

from tekoa import _lazy

__getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
