"""The collaborative optimizer and what it is made of."""

from __future__ import annotations

from swarmcli.optim.auxiliary import AuxiliaryCore
from swarmcli.optim.config import OptimizerConfig, PeerDescription
from swarmcli.optim.core import OptimizerCore
from swarmcli.optim.grad_scaler import GradScaler
from swarmcli.optim.gradients.grad_averager import GradientAverager
from swarmcli.optim.gradients.low_rank_averagers import PowerEFGradientAverager, PowerSGDGradientAverager
from swarmcli.optim.optimizer import Optimizer
from swarmcli.optim.peers.progress import GlobalTrainingProgress, LocalTrainingProgress
from swarmcli.optim.peers.progress_tracker import ProgressTracker
from swarmcli.optim.peers.report import PeerReport

__all__ = [
    "AuxiliaryCore",
    "GlobalTrainingProgress",
    "GradScaler",
    "GradientAverager",
    "LocalTrainingProgress",
    "Optimizer",
    "OptimizerConfig",
    "OptimizerCore",
    "PeerDescription",
    "PeerReport",
    "PowerEFGradientAverager",
    "PowerSGDGradientAverager",
    "ProgressTracker",
]
