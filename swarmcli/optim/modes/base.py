"""What all ways to train share: when the trainer waits, options of states, what is trained, and what people hear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import torch

from swarmcli.averaging import RoundResult
from swarmcli.compression import CompressionBase, NoCompression
from swarmcli.events import Events, Noticed
from swarmcli.optim.gradients.accumulator import GradientAccumulator
from swarmcli.optim.state.frozen import FrozenWeights, frozen_of
from swarmcli.optim.state.replica import InPlace, ParameterPlacement
from swarmcli.optim.state.training_state import Scheduler

if TYPE_CHECKING:
    from swarmcli.optim.state.norms import StepNorms


class Timing(Enum):
    """How long the trainer waits at the end of an epoch; the rest goes on while it computes (arXiv 2101.06840).

    If anything is delayed, the gradients of an epoch belong to the parameters of the epoch before: staleness one.
    """

    AT_ONCE = "at once"  # until this peer has stepped
    DELAYED_STEP = "delayed step"  # until the gradients are averaged
    DELAYED_AVERAGING = "delayed averaging"  # until the averager has the gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOptions:
    """When and how the peers' states are averaged, and how a state travels to a newcomer."""

    average_every: int | None = None  # epochs; None: every one with local updates or several groups, otherwise never
    delay: bool = True  # training goes on meanwhile, and what is learned meanwhile is added to the average
    statistics: tuple[str, ...] = ()  # names of the optimizer's statistics that are averaged with the parameters
    # Distance between parameters, relative to their norm, above which a peer takes over the others'; rounding on unlike
    # processors stays far below it.
    tolerance: float = 1e-3
    compression: CompressionBase = field(default_factory=NoCompression)  # of averaged states, or of local updates
    load_compression: CompressionBase = field(default_factory=NoCompression)  # of a state that a newcomer downloads

    def __post_init__(self) -> None:
        every = self.average_every
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(f"average_state_every={every!r}: expected None or a positive number of epochs")
        for name, codec in (("state_averaging", self.compression), ("load_state", self.load_compression)):
            if not isinstance(codec, CompressionBase):
                raise TypeError(f"{name}_compression={codec!r}: expected a codec such as Float16Compression()")
        if not 0 < self.tolerance < 1:
            raise ValueError(f"state_tolerance={self.tolerance!r}: expected a number between 0 and 1")


AS_USUAL = StateOptions()


class Trained:
    """What one peer trains: `optimizer` steps the parameters of `placement` in place."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None = None,
        extra_tensors: Sequence[torch.Tensor] = (),
        placement: ParameterPlacement | None = None,
        frozen: FrozenWeights | None = None,
        make_accumulator: Callable[..., GradientAccumulator] = GradientAccumulator,
    ) -> None:
        """`placement`: where the model's parameters are; None: they are the optimizer's own. `frozen`: weights of the
        model that nobody trains; None: those among the optimizer's parameters. `make_accumulator(parameters, reuse=…)`
        makes what sums the gradients (`reuse`: in their own `.grad`); a site has another one."""
        self.optimizer, self.scheduler, self.extra_tensors = optimizer, scheduler, extra_tensors
        self.placement = placement or InPlace([p for group in optimizer.param_groups for p in group["params"]])
        self.frozen = frozen or frozen_of(self.placement.model_parameters)
        self.make_accumulator = make_accumulator


@dataclass(frozen=True, slots=True)
class Advanced:
    """This peer has stepped and is at the next epoch."""

    committed: RoundResult
    own_samples: int  # of this peer, in the average
    seconds: float  # that the end of the epoch took
    norms: StepNorms | None = None  # of the step; None: the mode averages no gradients


def tell_lost(events: Events, samples: float, why: str = "they are of parameters that the run has left") -> None:
    """Warns that no round will count these samples of this peer any more."""
    if samples > 0:
        events.emit(Noticed("warning", f"{samples:.0f} samples of this peer are lost: {why}"))


class GivenUp:
    """Counts how often gradients that are not finite were dropped, and warns: once for each row of such batches, since
    a model that has diverged gives no others."""

    def __init__(self, events: Events) -> None:
        self.count = 0
        self._events = events
        self._said = False

    def note(self, samples: int, scale: float | None = None) -> None:
        """So many samples were dropped. `scale`: the factor of their losses; None: they were not scaled."""
        self.count += 1
        if not self._said:
            scaled = "" if scale is None else f", scaled by {scale:g},"
            text = f"{samples} samples of this peer are given up: their gradients{scaled} are not finite"
            self._events.emit(Noticed("warning", text))
        self._said = True

    def end(self) -> None:
        """A batch had finite gradients."""
        self._said = False
