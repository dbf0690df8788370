"""Averaging tensors with other peers: matchmaking, all-reduce, state sharing."""

from swarmcli.averaging.aggregators import Aggregator, CenteredClip, Mean, Median, TrimmedMean
from swarmcli.averaging.averager import AveragingMode, DecentralizedAverager
from swarmcli.averaging.config import AllreduceOptions, AveragerConfig, MatchmakingOptions
from swarmcli.averaging.core import AveragerCore
from swarmcli.averaging.round.result import RoundResult
from swarmcli.averaging.step_control import AveragingStage, RoundRequest, StepControl

__all__ = [
    "Aggregator",
    "AllreduceOptions",
    "AveragerConfig",
    "AveragerCore",
    "AveragingMode",
    "AveragingStage",
    "CenteredClip",
    "DecentralizedAverager",
    "MatchmakingOptions",
    "Mean",
    "Median",
    "RoundRequest",
    "RoundResult",
    "StepControl",
    "TrimmedMean",
]
