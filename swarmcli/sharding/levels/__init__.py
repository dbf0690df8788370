"""Averaging of parameters at several levels, over process groups or over the groups of a swarm."""

from swarmcli.sharding.levels.hierarchical_model_averager import HierarchicalModelAverager
from swarmcli.sharding.levels.plan import LevelAverage
from swarmcli.sharding.levels.swarm_groups import SwarmGroups

__all__ = ["HierarchicalModelAverager", "LevelAverage", "SwarmGroups"]
