"""How the tensors of several members become one: what a reducer does with each part, and an auditor after it."""

from swarmcli.averaging.aggregators.base import Aggregator
from swarmcli.averaging.aggregators.centered_clip import CenteredClip
from swarmcli.averaging.aggregators.mean import Mean
from swarmcli.averaging.aggregators.median import Median, TrimmedMean

__all__ = ["Aggregator", "CenteredClip", "Mean", "Median", "PartAggregator", "TrimmedMean"]
