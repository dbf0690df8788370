"""How the tensors of several members become one: what a reducer does with each part, and an auditor after it."""

from swarmcli.averaging.aggregators.base import Aggregator, PartAggregator
from swarmcli.averaging.aggregators.mean import Mean

__all__ = ["Aggregator", "Mean", "PartAggregator"]
