"""How the tensors of several members become one: a reducer combines each part, and an auditor does it again."""

from swarmcli.averaging.aggregators.base import Aggregator
from swarmcli.averaging.aggregators.centered_clip import CenteredClip
from swarmcli.averaging.aggregators.mean import Mean
from swarmcli.averaging.aggregators.median import Median, TrimmedMean

__all__ = ["Aggregator", "CenteredClip", "Mean", "Median", "TrimmedMean"]
