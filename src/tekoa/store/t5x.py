"""T5X checkpoints as trees: `tekoa.store.t5x.read` and `tekoa.store.t5x.write`."""

from tekoa.store.formats.t5x.tree import read as read
from tekoa.store.formats.t5x.tree import write as write
