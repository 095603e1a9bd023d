"""The names of the original `amos_helper`: rule tables and partitioning of the slots."""

from tekoa.core.formula import evaluate as evaluate
from tekoa.core.rules import params_fn_from_assign_map as params_fn_from_assign_map
from tekoa.optim.amos.partition import maybe_reduce_axis_names as maybe_reduce_axis_names
from tekoa.optim.amos.partition import state_partition_rule as state_partition_rule
