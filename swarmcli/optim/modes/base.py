"""A way to train, as one object: what it refuses, the work it builds for each epoch, and what follows for a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from swarmcli.averaging import AveragerCore, RoundResult
from swarmcli.averaging.checks import check_flags
from swarmcli.compression import CompressionBase, NoCompression
from swarmcli.events import Events, Noticed
from swarmcli.optim.config import PeerContext
from swarmcli.optim.gradients.accumulator import GradientAccumulator, Weighed
from swarmcli.optim.state.frozen import FrozenWeights, frozen_of
from swarmcli.optim.state.replica import Companions, InPlace, ParameterPlacement, Replica
from swarmcli.optim.state.training_state import Scheduler, TrainingState

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerConfig
    from swarmcli.dht import DHTNode
    from swarmcli.optim.state.lineage import LineagePosition
    from swarmcli.optim.state.norms import StepNorms


class Timing(Enum):
    """For what of an epoch's end the trainer waits; the rest goes on while it computes (arXiv 2101.06840).

    Where anything is delayed, gradients of an epoch belong to the parameters of the epoch before: staleness one.
    """

    AT_ONCE = "at once"  # until this peer has stepped
    DELAYED_STEP = "delayed step"  # until the gradients are averaged
    DELAYED_AVERAGING = "delayed averaging"  # until the gradients are in the averager's hands


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOptions:
    """When and how the peers' states are averaged, and how a state travels to a newcomer."""

    average_every: int | None = None  # epochs; None: every one with local updates or several groups, otherwise never
    delay: bool = True  # training goes on meanwhile, and what was learned meanwhile is added to the average
    statistics: tuple[str, ...] = ()  # of the optimizer, by name, that are averaged with the parameters
    # Distance between parameters, relative to their norm, above which they are repaired; rounding on unlike processors
    # stays far below it.
    tolerance: float = 1e-3
    compression: CompressionBase = field(default_factory=NoCompression)  # of what local updates average
    load_compression: CompressionBase = field(default_factory=NoCompression)

    def __post_init__(self) -> None:
        every = self.average_every
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(f"average_state_every={every!r}: expected None or a positive number of epochs")
        for name, codec in (("state_averaging", self.compression), ("load_state", self.load_compression)):
            if not isinstance(codec, CompressionBase):
                raise TypeError(f"{name}_compression={codec!r}: expected a codec such as Float16Compression()")
        if not 0 < self.tolerance < 1:
            raise ValueError(f"state_tolerance={self.tolerance!r}: expected a number between 0 and 1")


class Trained:
    """The training of one peer: the parameters of `placement` by `optimizer`, which steps in place."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None = None,
        extra_tensors: Sequence[torch.Tensor] = (),
        placement: ParameterPlacement | None = None,
        frozen: FrozenWeights | None = None,
    ) -> None:
        """`placement` says where the model's parameters are if the optimizer's are others; `frozen` are those of the
        model that nobody trains, if the optimizer does not have them all."""
        self.optimizer, self.scheduler, self.extra_tensors = optimizer, scheduler, extra_tensors
        self.placement = placement or InPlace([p for group in optimizer.param_groups for p in group["params"]])
        self.frozen = frozen or frozen_of(self.placement.model_parameters)

    def state(
        self,
        run_id: str,
        *,
        shared: Mapping[str, torch.Tensor] | None = None,
        own: Mapping[str, torch.Tensor] | None = None,
        extra_tensors: Sequence[torch.Tensor] | None = None,
    ) -> TrainingState:
        """With what a mode keeps beside the parameters, see TrainingState; `extra_tensors` in the place of the
        model's."""
        extra = self.extra_tensors if extra_tensors is None else extra_tensors
        return TrainingState(run_id, self.optimizer, self.scheduler, extra, shared=shared, own=own)


class AccumulatorFactory(Protocol):
    """Makes what sums the gradients of the parameters that are trained: of a site, those of all its processes."""

    def __call__(self, parameters: Sequence[torch.Tensor], *, reuse: bool) -> GradientAccumulator: ...


@dataclass(frozen=True, slots=True)
class SiteHooks:
    """Where the processes of a site take part in what one process does otherwise."""

    make_accumulator: AccumulatorFactory = GradientAccumulator  # of what sums the gradients
    companions: Companions | None = None  # other processes that make local updates beside this one


@dataclass(frozen=True, slots=True)
class Advanced:
    """This peer has stepped and is at the next epoch."""

    committed: RoundResult
    own_samples: int  # of this peer, in the average
    seconds: float  # that the end took
    norms: StepNorms | None = None  # of the step; None: the mode averages no gradients


class EpochWork(Protocol):
    """Takes in batches, brings something to the round that ends the epoch, and steps with the outcome.

    Its coroutines exclude each other where they must: `accumulate` may be called while what was frozen is on its way.
    """

    replica: Replica  # what steps
    averager: AveragerCore  # whose group ends the epoch
    replays: bool  # whether a round that one group committed, and this peer missed, can be made up for with `replay`
    given_up: GivenUp  # batches, or all that had been accumulated, whose gradients were not finite

    @property
    def samples(self) -> int:
        """Accumulated for the next round; those frozen to the present one are not among them."""

    async def accumulate(self, batch_size: int, scale: float | None = None, weight: float | None = None) -> None:
        """The present gradients of the parameters, means over `batch_size` samples that have this weight in the average
        (None: as many as they are). ValueError: they do not fit.

        A batch with a gradient that is not finite is dropped, and `given_up` counts it. With `scale` the losses were
        multiplied by it; then all that this peer has accumulated for the round may be given up with it.
        """

    async def freeze(self) -> Weighed:
        """Fixes what the averager averages, and returns its samples and its weight.

        What is accumulated from now on belongs to the next round. Called again before the outcome is known, it changes
        nothing and returns the same.
        """

    async def restore(self) -> None:
        """The round is dead: what was frozen counts for the next one. Without effect if nothing was."""

    async def set_aside(self) -> None:
        """The round is undecided: it may have counted what was frozen, so no other round gets that. If the run turns
        out to go on from that round, its record says what it counted; otherwise these samples are told as lost.
        Without effect if nothing was frozen."""

    async def average_alone(self) -> None:
        """Makes what was frozen the average, as in a round with nobody else."""

    async def advance(self, committed: RoundResult) -> StepNorms | None:
        """Steps with the averager's tensors; from here on the replica is at the next epoch of the next lineage. Returns
        how far the step went; None where no gradients are averaged.

        If the round counted any share of what was frozen, all of it is used up: no round gets the rest.
        """

    async def replay(self, averages: Sequence[torch.Tensor], committed: RoundResult) -> None:
        """Steps with a round that this peer missed; gradients of former parameters, accumulated or frozen, are
        dropped."""

    async def pass_by(self, wanted: LineagePosition) -> bool:
        """Goes to `wanted` with the parameters as they are, where lineages only count epochs.

        What was accumulated or frozen, of epochs that are over, is dropped. False, and nothing changed: it leads
        elsewhere.
        """

    async def drop(self) -> None:
        """Drops what was accumulated or frozen: it belongs to parameters that are gone."""

    async def start_over(self) -> None:
        """The state has been replaced by another peer's: drops all that belonged to the former one."""


@dataclass(frozen=True, kw_only=True)
class Mode(ABC):
    """A way to train that all peers of a run share, with its options. Each is a subclass in a file of its own,
    named in `modes/__init__.py`. Raises ValueError for options that cannot work together, with the reason.
    """

    timing: Timing = Timing.AT_ONCE
    reuse_grad_buffers: bool = False  # the parameters' gradients are the sums: no other buffer
    share_gradients: bool = False  # the last average is part of the state that newcomers download
    local: ClassVar[bool] = False  # each peer steps at every batch, and parameters are averaged in place of gradients
    target_group_size: int | None = None  # where more peers are there, several groups end each epoch; None: never
    state: StateOptions = StateOptions()

    def __post_init__(self) -> None:
        check_flags(reuse_grad_buffers=self.reuse_grad_buffers, use_ext_grad_buffer=self.share_gradients)

    @abstractmethod
    def build(self, peer: PeerContext, trained: Trained, site: SiteHooks) -> EpochWork:
        """Makes a trainer's work in its epochs. Raises ValueError for hooks that have no meaning in this mode."""

    @abstractmethod
    def assisting_averager(
        self,
        node: DHTNode,
        config: AveragerConfig,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor] = (),
    ) -> AveragerCore:
        """Makes the averager of an auxiliary, which reduces for the trainers. `parameters`, `buffers`: tensors that are
        never touched, of the shapes of the trainers' ones."""

    def brings(self, epoch: int) -> bool:
        """Whether the round that ends this epoch, the first being 0, averages anything; otherwise it only counts."""
        return True

    def configured(self, config: AveragerConfig) -> AveragerConfig:
        """The configuration of its averager, from that of the run's gradients."""
        return config

    # lineages

    def after(self, position: LineagePosition, committed: RoundResult, target_batch_size: int) -> LineagePosition:
        """Where a round leads that was committed at `position`. Where several groups ended the epoch, peers differ by
        design, and their lineage only counts epochs."""
        if committed.several:
            return position.by_epoch(target_batch_size)
        return position.after(committed.round_id, committed.total_samples)

    # the averaging of states

    def average_state_every(self, several: bool) -> int | None:
        """Epochs; None: when sketches of the peers' parameters part. `several`: groups ended the last one."""
        every = self.state.average_every
        return 1 if every is None and several else every

    def state_weight(self, weight: float) -> float:
        """The weight of a peer whose gradients weighed so much in the epoch, when states are averaged after it."""
        return 1.0


def tell_lost(events: Events, samples: float, why: str = "they are of parameters that the run has left") -> None:
    """No round will count so many samples of this peer any more."""
    if samples > 0:
        events.emit(Noticed("warning", f"{samples:.0f} samples of this peer are lost: {why}"))


def tell_undecided(events: Events, aside: Weighed, counted: float = 0.0) -> None:
    """The run goes on from a round that has counted so many of these samples; from none that is known, if 0."""
    tell_lost(events, aside.samples - counted, "nobody could say whether the round that had them was committed")


class GivenUp:
    """Counts how often gradients that are not finite were given up, and says so: once for each row of such batches, for
    a model that has diverged gives no others."""

    def __init__(self, events: Events) -> None:
        self.count = 0
        self._events = events
        self._said = False

    def note(self, samples: int, scale: float | None = None) -> None:
        """So many samples were dropped; `scale`: of their losses."""
        self.count += 1
        if not self._said:
            scaled = "" if scale is None else f", scaled by {scale:g},"
            text = f"{samples} samples of this peer are given up: their gradients{scaled} are not finite"
            self._events.emit(Noticed("warning", text))
        self._said = True

    def end(self) -> None:
        """A batch was sound."""
        self._said = False
