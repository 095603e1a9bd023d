"""Amos, an Adam-style optimizer whose weight decay targets a given scale per parameter."""

from tekoa.optim.amos.transform import amos as amos
from tekoa.optim.amos.transform import scale_by_amos as scale_by_amos
