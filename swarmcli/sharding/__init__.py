"""Optimizers and models spread over several processes: sharded optimizer states, averaging at several levels."""

from swarmcli.sharding.levels import HierarchicalModelAverager, LevelAverage, SwarmGroups
from swarmcli.sharding.zero import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved

__all__ = [
    "HierarchicalModelAverager",
    "LevelAverage",
    "SwarmGroups",
    "ZeroRedundancyOptimizer",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
]
