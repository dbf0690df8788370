"""The collaborative optimizer and what it is made of."""

from __future__ import annotations

from swarmcli.optim.config import PeerDescription
from swarmcli.optim.grad_scaler import GradScaler
from swarmcli.optim.gradients.grad_averager import GradientAverager
from swarmcli.optim.gradients.low_rank_averagers import PowerEFGradientAverager, PowerSGDGradientAverager
from swarmcli.optim.modes import Outer
from swarmcli.optim.modes.sparse import Sparse
from swarmcli.optim.optimizer import Optimizer
from swarmcli.optim.peers.report import PeerReport
from swarmcli.optim.peers.tracker import ProgressTracker

__all__ = [
    "GradScaler",
    "GradientAverager",
    "Optimizer",
    "Outer",
    "PeerDescription",
    "PeerReport",
    "PowerEFGradientAverager",
    "PowerSGDGradientAverager",
    "ProgressTracker",
    "Sparse",
]
