"""Checkpoints on disk: commit, verification, lease, retention, formats.

Names are imported when first used, so that listing and inspecting steps does not import JAX.
"""

from tekoa import _lazy

__getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
