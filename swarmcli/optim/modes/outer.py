"""Outer steps: every peer steps by itself, a round averages how far they went, and an anchor steps with that. Local
updates are the preset in which the anchor goes to the average of where the peers are.

This is DiLoCo (arXiv 2311.08105) with rounds that end by the swarm's samples. To the run it is synchronous training of
the anchor: lineages, downloads, replays and checkpoints are of anchors, equal at all peers. Each peer has its own
statistics of the inner optimizer: a newcomer begins with empty ones at the anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch

from swarmcli.averaging.checks import as_count
from swarmcli.optim.gradients.accumulator import Weighed
from swarmcli.optim.modes.base import Timing, tell_lost
from swarmcli.optim.modes.gradients import GradientWork, Mode
from swarmcli.optim.modes.sparse import Sparse
from swarmcli.optim.state.anchor import Anchored
from swarmcli.optim.state.averaging import statistic_slots
from swarmcli.optim.state.buffers import Buffers
from swarmcli.optim.state.differences import Differences, steps_of
from swarmcli.optim.state.replica import Replica
from swarmcli.optim.state.training_state import TrainingState

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerConfig, RoundResult
    from swarmcli.optim.config import PeerContext
    from swarmcli.optim.modes.base import Trained
    from swarmcli.optim.state.lineage import LineagePosition
    from swarmcli.optim.state.norms import StepNorms

OuterOptimizer: TypeAlias = Literal["nesterov", "sgd", "adam"] | Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Outer:
    """How all peers of a run take outer steps. Raises ValueError or TypeError, which name the option.

    `inner_batch_size` samples of a peer make an inner step, in one batch or in several; None: each batch makes one, and
    a peer's weight is its samples. `target_batch_size` samples of the swarm make an outer step. `optimizer` is a
    factory that takes parameters, or a name, with `lr` and `momentum` (Adam's first beta), by default

        sgd        1.0, 0     the anchor goes where the peers went on average: best where there are few rounds
        nesterov   0.7, 0.9   as in the paper, for runs of very many rounds
        adam       0.1, 0.9
    """

    inner_batch_size: int | None
    optimizer: OuterOptimizer = "sgd"
    lr: float | None = None
    momentum: float | None = None

    def __post_init__(self) -> None:
        if self.inner_batch_size is not None:
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
        """`lr` and `momentum`, or the optimizer's defaults where they are None."""
        lr, momentum = {"sgd": (1.0, 0.0), "nesterov": (0.7, 0.9)}.get(str(self.optimizer), (0.1, 0.9))
        return lr if self.lr is None else self.lr, momentum if self.momentum is None else self.momentum

    def make(self, parameters: Any) -> torch.optim.Optimizer:
        """Makes the outer optimizer of these parameters."""
        if callable(self.optimizer):
            return self.optimizer(parameters)
        lr, momentum = self.rates
        if self.optimizer == "adam":
            return torch.optim.Adam(parameters, lr, betas=(momentum, 0.95))  # arXiv 2311.08105, appendix
        return torch.optim.SGD(parameters, lr, momentum, nesterov=self.optimizer == "nesterov" and momentum > 0)


@dataclass(frozen=True, kw_only=True)
class OuterSteps(Mode):
    outer: Outer

    def __post_init__(self) -> None:
        super().__post_init__()
        words = "in local updates (grad_averager=None)" if self.local else "with outer steps"
        unused = {
            "reuse_grad_buffers=True": (self.reuse_grad_buffers, "gradients are used up by inner steps"),
            "use_ext_grad_buffer=True": (self.share_gradients, "no gradients are averaged"),
        }
        if self.local:
            delayed = self.timing is Timing.DELAYED_AVERAGING
            unused["delay_grad_averaging=True"] = delayed, "no gradients are averaged"
        else:
            unused["average_state_every"] = self.state.average_every is not None, "the anchors of all peers are equal"
            unused["target_group_size"] = self.target_group_size is not None, "one anchor needs one group"
        for option, (given, reason) in unused.items():
            if given:
                raise ValueError(f"{option} has no use {words}: {reason}")

    def room_for_riders(self, trained: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.zeros_like(each, device="cpu") for each in trained for _ in dict.fromkeys(self.state.statistics)]

    def build(self, peer: PeerContext, trained: Trained) -> GradientWork:
        place = Anchored(trained.placement, self.outer.make)
        buffers, riders = Buffers(trained.extra_tensors), Riders(trained.optimizer, self.state.statistics)
        differences = Differences(place, trained.optimizer, self.outer.inner_batch_size)
        method = self.method(differences.means, [*buffers.means, *riders.means])
        # The anchor's state: for local updates with the statistics and settings of the inner optimizer; otherwise with
        # those of the outer one and only the settings of the inner one, whose statistics each peer has for itself.
        inner, outer = trained.optimizer, place.optimizer
        state = TrainingState(
            peer.config.run_id,
            inner if self.local else outer,
            trained.scheduler,
            buffers.own,
            own=method.own,
            inner=None if self.local else inner,
            outer=outer,
        )
        replica = Replica(state, place, buffers)
        return OuterWork(self, peer, replica, differences, method, (buffers, riders))


@dataclass(frozen=True, kw_only=True)
class LocalUpdates(OuterSteps):
    """Outer steps of plain SGD with rate 1, where each batch makes an inner step. After each epoch, or each n-th, peers
    go on from the mean of where they are, weighted by samples; what they learned meanwhile is added to it.

    There are no outer statistics, and newcomers get the donor's inner statistics.
    """

    outer: Outer = Outer(None)
    local: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        # Nobody waits for gradients: what is delayed is the averaging of parameters.
        object.__setattr__(self, "timing", Timing.DELAYED_AVERAGING if self.state.delay else Timing.AT_ONCE)

    def brings(self, epoch: int) -> bool:
        return (epoch + 1) % (self.state.average_every or 1) == 0

    def average_state_every(self, several: bool) -> int | None:
        return super().average_state_every(several) if several else None

    def state_weight(self, weight: float) -> float:
        return weight

    def configured(self, config: AveragerConfig) -> AveragerConfig:
        return replace(config, allreduce=replace(config.allreduce, compression=self.state.compression))


@dataclass(frozen=True, kw_only=True)
class SparseOuterSteps(Sparse, OuterSteps):
    """SparseLoCo (arXiv 2508.15706): of the differences the largest numbers travel; residuals keep the rest for later
    rounds. There is no outer momentum beside them: it would apply again what has been sent.

    Differences are divided by their steps, so residuals are in units of inner_batch_size times a distance. Raises
    ValueError for a momentum and for adam; an optimizer that a factory makes is not checked.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        outer, momentum = self.outer, self.outer.rates[1]
        if outer.optimizer == "adam" or (not callable(outer.optimizer) and momentum):
            raise ValueError(
                f"outer.optimizer={outer.optimizer!r}, outer.momentum={momentum!r}: Sparse keeps what has not "
                "been sent, and a momentum would apply what has been sent again; use Outer(optimizer='sgd', momentum=0)"
            )


class Riders:
    """Statistics of the inner optimizer that are averaged in the same rounds, and come back by the delta rule."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Sequence[str]) -> None:
        """Raises OptimizerError or ValueError for statistics that cannot be averaged."""
        self._slots = list(statistic_slots(optimizer, names))
        self.means = [slot.copied() for slot in self._slots]  # what the round averages
        self._before: list[torch.Tensor] = []  # the statistics as they went into the round

    def load(self) -> None:
        self._before = [slot.copied() for slot in self._slots]
        for mean, before in zip(self.means, self._before, strict=True):
            mean.copy_(before)

    def finish(self, counted: bool) -> None:
        """Applies the round's averages. Not `counted`: this peer replays the round, and its own statistics stay."""
        before, self._before = self._before, []
        if before and counted:
            for slot, mean, then in zip(self._slots, self.means, before, strict=True):
                slot.move(mean, then)


class OuterWork(GradientWork):
    """GradientWork for differences. The model computes with what the peer has learned; the replica steps the anchor."""

    _gradients: Differences
    _mode: OuterSteps
    if_undecided = "this peer's samples count if the run goes on from it, and are lost otherwise"
    _aside = Weighed()  # what this peer handed in to a round of this position that is undecided

    def _add(self, batch_size: int, scale: float | None, weight: float | None) -> bool:
        if self._mode.local:  # before this step is noted: an end that is under way may look too late
            self.replica.state.check_rates()
        return self._gradients.add(batch_size, scale, weight)

    async def accumulate(self, batch_size: int, scale: float | None = None, weight: float | None = None) -> None:
        self.replica.placement.check_trained()
        # The end of an epoch may step the anchor meanwhile: an inner step never begins in the middle of that.
        if await self.replica.change(partial(self._add, batch_size, scale, weight)):
            self.given_up.end()
        else:
            self.given_up.note(batch_size, scale)
        if self._mode.local:
            self.replica.state.note_step()
        place = self.replica.placement
        if isinstance(place, Anchored) and place.moved:
            await self.replica.publish()

    @property
    def _brings(self) -> bool:
        return self._mode.brings(self.replica.position.epoch)

    def _travels(self) -> Sequence[torch.Tensor]:
        return self.method.tensors if self._brings else [torch.zeros(1)]

    async def _go_on(self) -> None:
        if self._mode.state.average_every is not None:
            await self.averager.take_up(self._travels())

    def _freeze(self) -> Weighed:
        if not self._brings:
            return self._gradients.count()
        return super()._freeze()

    def _step(self, position: LineagePosition, committed: RoundResult, *, missed: bool = False) -> StepNorms | None:
        if not self._brings:
            self._gradients.handed_in, self._handed = Weighed(), None
            self.replica.state.end_epoch(position)
            return None
        norms = super()._step(position, committed, missed=missed)
        place = self.replica.placement
        if self._mode.local and isinstance(place, Anchored) and committed.weights.keys() == {self._own_id}:
            place.arrive()
        return norms

    async def set_aside(self) -> None:
        """The round is undecided: it may have counted what was frozen. What a peer has learned stays in its model at
        the next position too, so no other round may get it. If the run turns out to go on from that round, its record
        says what it counted; otherwise this peer warns that these samples are lost."""
        if self._handed is not None:
            self._tell_aside(0.0)
            self._aside = self._handed
        await super().set_aside()

    def _set_aside(self) -> None:
        self.method.set_aside()
        self._gradients.set_aside()

    def _forget_aside(self, counted: float) -> None:
        super()._forget_aside(counted)
        self._tell_aside(counted)

    def _tell_aside(self, counted: float) -> None:
        aside, self._aside = self._aside, Weighed()
        why = "nobody could say whether the round that had them was committed"
        tell_lost(self._events, aside.samples - counted, why)

    def _drop_former(self, counted: float) -> None:
        """Drops nothing: what the model has learned stays on top of the anchor."""

    def _descent(self, committed: RoundResult) -> Sequence[torch.Tensor]:
        """How far the peers went on average. With `inner_batch_size` the round averages differences per inner step;
        this multiplies them by the mean number of steps."""
        inner_batch = self._mode.outer.inner_batch_size
        if inner_batch is None:
            return self.method.averaged
        pairs = [(weight, committed.samples[peer]) for peer, weight in committed.weights.items()]
        steps = steps_of(pairs, inner_batch)
        return [mean.mul_(steps) for mean in self.method.averaged]
