"""How the swarm's mean gradient comes from everyone's: the seam between plain averaging and compressed methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from swarmcli.optim.gradients.accumulator import GradientAccumulator

if TYPE_CHECKING:
    from swarmcli.averaging.phases.program import RoundProgram


class GradientMethod(Protocol):
    """One peer's side of it. Works on the means of one GradientAccumulator; belongs to one AveragerCore.

    Around a round: `load` when the means are handed in; the round, or `alone`; `finish` when it committed. A round
    that failed calls for nothing, since nothing that outlives a round has changed: `load` may simply follow again.

    averaged  dense mean gradients in host memory, in the shapes of the parameters; valid after `finish`
    tensors   what the averager is made with, and keeps of committed rounds for replays
    program   the phases of a round; None: one all-reduce over `tensors`
    shared    what all peers hold alike beside their parameters, and a newcomer needs: name → tensor
    own       what belongs to this peer, and goes nowhere but into its checkpoints
    """

    @property
    def averaged(self) -> Sequence[torch.Tensor]: ...
    @property
    def tensors(self) -> Sequence[torch.Tensor]: ...
    @property
    def program(self) -> RoundProgram | None: ...
    @property
    def shared(self) -> Mapping[str, torch.Tensor]: ...
    @property
    def own(self) -> Mapping[str, torch.Tensor]: ...

    def load(self, samples: float) -> None:
        """The accumulator's means, over so many samples of this peer, are what the next round averages."""

    def alone(self) -> None:
        """`tensors` become what a round with nobody else would give."""

    def finish(self, samples: float, counted: bool) -> None:
        """`tensors` hold what a round of `samples` gave: writes `averaged`, and moves what outlives the round.

        `counted`: what was loaded here is in it; False where this peer was left out, or follows a round of others.
        The means that were loaded are used up.
        """

    def reset_own(self) -> None:
        """The parameters are others than those that `own` came from."""


class MethodFactory(Protocol):
    """A method with its options, before there are gradients."""

    def __call__(self, accumulator: GradientAccumulator) -> GradientMethod: ...

    def outline(self, parameters: Sequence[torch.Tensor]) -> Outline:
        """What an auxiliary's averager needs to reduce for others, from the parameters' shapes and types alone."""


@dataclass(frozen=True)
class Outline:
    """The content of the tensors is undefined; memory that nobody writes to costs nothing."""

    tensors: Sequence[torch.Tensor]
    program: RoundProgram | None
