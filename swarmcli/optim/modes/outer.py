"""Outer steps: every peer steps by itself, a round averages how far they went, and an anchor steps with that.

DiLoCo (arXiv 2311.08105) with rounds that end by the swarm's samples. To the run it is synchronous training of the
anchor: lineages, downloads, replays and checkpoints are of anchors, equal at all peers. The statistics of the inner
optimizer are each peer's own: a newcomer begins with empty ones at the anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from swarmcli.averaging.checks import as_count
from swarmcli.optim.modes.sparse import Sparse
from swarmcli.optim.modes.synchronous import GradientWork, Synchronous
from swarmcli.optim.state.anchor import Anchored
from swarmcli.optim.state.buffers import Buffers
from swarmcli.optim.state.differences import Differences, steps_of
from swarmcli.optim.state.replica import InPlace, Replica
from swarmcli.optim.state.training_state import TrainingState

if TYPE_CHECKING:
    from swarmcli.optim.config import PeerContext
    from swarmcli.optim.modes.base import CommittedRound, EpochWork, SiteHooks, Trained

OuterOptimizer: TypeAlias = Literal["nesterov", "sgd", "adam"] | Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Outer:
    """Outer steps, as all peers of a run take them. Raises ValueError or TypeError, which name the option.

    `inner_batch_size` samples make an inner step of a peer, in one batch or in several; `target_batch_size` samples of
    the swarm make an outer one. `optimizer` is a factory that takes parameters, or a name, for which `lr` and
    `momentum` (Adam's first beta) count, by default

        sgd        1.0, 0     the anchor goes where the peers went on average: best where there are few rounds
        nesterov   0.7, 0.9   as in the paper, for runs of very many rounds
        adam       0.1, 0.9
    """

    inner_batch_size: int
    optimizer: OuterOptimizer = "sgd"
    lr: float | None = None
    momentum: float | None = None

    def __post_init__(self) -> None:
        as_count(self.inner_batch_size, "outer.inner_batch_size", least=1)
        lr, momentum = self.rates
        if not lr > 0:
            raise ValueError(f"outer.lr={lr!r}: expected a positive number")
        if not 0 <= momentum < 1:
            raise ValueError(f"outer.momentum={momentum!r}: expected a number from 0 to below 1")
        if not callable(self.optimizer) and self.optimizer not in ("nesterov", "sgd", "adam"):
            raise ValueError(f"outer.optimizer={self.optimizer!r}: expected nesterov, sgd, adam or a factory")

    @property
    def rates(self) -> tuple[float, float]:
        """`lr` and `momentum`, where they are None what is usual for the optimizer."""
        lr, momentum = {"sgd": (1.0, 0.0), "nesterov": (0.7, 0.9)}.get(str(self.optimizer), (0.1, 0.9))
        return lr if self.lr is None else self.lr, momentum if self.momentum is None else self.momentum

    def make(self, parameters: Any) -> torch.optim.Optimizer:
        """The outer optimizer of these parameters."""
        if callable(self.optimizer):
            return self.optimizer(parameters)
        lr, momentum = self.rates
        if self.optimizer == "adam":
            return torch.optim.Adam(parameters, lr, betas=(momentum, 0.95))  # arXiv 2311.08105, appendix
        return torch.optim.SGD(parameters, lr, momentum, nesterov=self.optimizer == "nesterov" and momentum > 0)


@dataclass(frozen=True, kw_only=True)
class OuterSteps(Synchronous):
    outer: Outer

    def __post_init__(self) -> None:
        super().__post_init__()
        unused = {
            "reuse_grad_buffers=True": (self.reuse_grad_buffers, "gradients are used up by inner steps"),
            "use_ext_grad_buffer=True": (self.share_gradients, "no gradients are averaged"),
            "average_state_every": (self.state.average_every is not None, "the anchors of all peers are equal"),
            "target_group_size": (self.target_group_size is not None, "one anchor needs one group"),
        }
        for option, (given, reason) in unused.items():
            if given:
                raise ValueError(f"{option} has no use with outer steps: {reason}")

    def build(self, peer: PeerContext, trained: Trained, site: SiteHooks) -> EpochWork:
        if not isinstance(trained.placement, InPlace):
            raise ValueError("offload_optimizer: with outer steps the optimizer makes inner steps, of the model itself")
        if site.companions is not None:
            raise ValueError("site: with outer steps a peer is one process")
        place = Anchored(trained.placement.model_parameters, self.outer.make)
        buffers = Buffers(trained.extra_tensors)
        differences = Differences(place, trained.optimizer, self.outer.inner_batch_size)
        method = self.method(differences, buffers.means)
        inner, run_id = trained.optimizer, peer.config.run_id
        state = TrainingState(run_id, place.optimizer, trained.scheduler, buffers.own, own=method.own, inner=inner)
        return OuterWork(self, peer, Replica(state, place, buffers=buffers), differences, method)


@dataclass(frozen=True, kw_only=True)
class SparseOuterSteps(Sparse, OuterSteps):
    """SparseLoCo (arXiv 2508.15706): of the differences the largest numbers travel, and no outer momentum is beside
    the residuals, which are of what outer steps have not moved yet: it would move that once more.

    Differences are divided by their steps, so residuals are in units of inner_batch_size times a distance. Raises
    ValueError for a momentum and for adam; an optimizer that a factory makes is taken as it is.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        outer, momentum = self.outer, self.outer.rates[1]
        if outer.optimizer == "adam" or (not callable(outer.optimizer) and momentum):
            raise ValueError(
                f"outer.optimizer={outer.optimizer!r}, outer.momentum={momentum!r}: Sparse keeps what has not "
                "been sent, and a momentum would apply what has been sent again; use Outer(optimizer='sgd', momentum=0)"
            )


class OuterWork(GradientWork):
    """GradientWork of differences. The model computes with what the peer has learned, the replica steps the anchor."""

    _gradients: Differences
    _mode: OuterSteps

    async def accumulate(self, batch_size: int, scale: float | None = None, weight: float | None = None) -> None:
        self.replica.placement.check_trained()
        # An inner step begins at the anchor, which the end of an epoch steps beside the trainer: never at half of it.
        if await self.replica.change(partial(self._gradients.add, batch_size, scale, weight)):
            self.given_up.end()
        else:
            self.given_up.note(batch_size, scale)

    def _drop_former(self) -> None:
        """Nothing: what the model has learned stays on top of the anchor."""

    def _descent(self, committed: CommittedRound) -> Sequence[torch.Tensor]:
        """How far the peers went, each inner step counting by its weight."""
        pairs = [(weight, committed.contributed[peer]) for peer, weight in committed.weights.items()]
        steps = steps_of(pairs, self._mode.outer.inner_batch_size)
        return [mean.mul_(steps) for mean in self.method.averaged]
