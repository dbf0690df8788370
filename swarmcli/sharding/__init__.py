"""Optimizers and models spread over several processes: sharded optimizer states, averaging at several levels."""

from swarmcli.sharding.levels import HierarchicalModelAverager, LevelAverage, SwarmGroups

__all__ = ["HierarchicalModelAverager", "LevelAverage", "SwarmGroups"]
