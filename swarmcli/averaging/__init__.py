"""Averaging tensors with other peers: matchmaking, all-reduce, state sharing."""

from swarmcli.averaging.averager import AveragingMode, DecentralizedAverager
from swarmcli.averaging.config import AllreduceOptions, AveragerConfig, MatchmakingOptions
from swarmcli.averaging.control import AveragingStage, RoundRequest, RoundResult, StepControl
from swarmcli.averaging.core import AveragerCore
from swarmcli.averaging.group import Group, Member

__all__ = [
    "AllreduceOptions",
    "AveragerConfig",
    "AveragerCore",
    "AveragingMode",
    "AveragingStage",
    "DecentralizedAverager",
    "Group",
    "MatchmakingOptions",
    "Member",
    "RoundRequest",
    "RoundResult",
    "StepControl",
]
