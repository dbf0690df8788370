"""Optimizers and models spread over several processes: sharded optimizer states, averaging at several levels."""

from swarmcli.sharding.levels import HierarchicalModelAverager, LevelAverage, SwarmGroups
from swarmcli.sharding.zero import ZeroRedundancyOptimizer

__all__ = ["HierarchicalModelAverager", "LevelAverage", "SwarmGroups", "ZeroRedundancyOptimizer"]
