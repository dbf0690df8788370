"""What a peer does in an epoch, whichever way the run trains: the seam between modes and the end of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import torch

from swarmcli.events import Events, Noticed

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerCore
    from swarmcli.optim.epoch.group import Committed
    from swarmcli.optim.membership.lineage import Standing


class Timing(Enum):
    """For what of an epoch's end the trainer waits; the rest goes on while it computes (arXiv 2101.06840).

    Where anything is delayed, gradients of an epoch belong to the parameters of the epoch before: staleness one.
    """

    AT_ONCE = "at once"  # until this peer has stepped
    DELAYED_STEP = "delayed step"  # until the gradients are averaged
    DELAYED_AVERAGING = "delayed averaging"  # until the gradients are in the averager's hands


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


class EpochWork(Protocol):
    """Takes in batches, brings something to the round that ends the epoch, and steps with the outcome.

    Its coroutines exclude each other where they must: `take_in` may be called while what was handed in is on its way.
    """

    averager: AveragerCore  # whose standing group ends the epoch
    replays: bool  # whether a round that one group committed, and this peer missed, can be made up for with `replay`

    @property
    def samples(self) -> int:
        """Taken in for the next round; those handed in to the present one are not among them."""

    @property
    def overflows(self) -> int:
        """How often a batch, or all that had been taken in, was given up because gradients were not finite."""

    async def take_in(self, batch_size: int, scale: float | None = None) -> None:
        """The present gradients of the parameters, means over `batch_size` samples. ValueError: they do not fit.

        A batch with a gradient that is not finite is dropped, and `overflows` counts it. With `scale` the losses were
        multiplied by it; then all that this peer has taken in for the round may be given up with it.
        """

    async def hand_in(self) -> int:
        """Fixes what the averager averages, and returns its weight, in samples.

        What is taken in from now on belongs to the next round. Called again before the outcome is known, it changes
        nothing and returns the same.
        """

    async def take_back(self) -> None:
        """No round used what was handed in: it counts for the next one. Without effect if nothing was."""

    async def average_alone(self) -> None:
        """What was handed in becomes the average, as in a round with nobody else."""

    async def advance(self, committed: Committed, counted: bool) -> None:
        """Steps with the averager's tensors; from here on the replica is at the next epoch of the next lineage.

        `counted`: this peer's part is in the average. Nothing is handed in any more.
        """

    async def replay(self, averages: Sequence[torch.Tensor], round_id: bytes, samples: int) -> None:
        """Steps with a round that this peer missed; what it took in or handed in, of former parameters, is dropped."""

    async def pass_by(self, wanted: Standing) -> bool:
        """Goes to `wanted` with the parameters as they are, where lineages only count epochs.

        What was taken in or handed in, of epochs that are over, is dropped. False, and nothing changed: it leads
        elsewhere.
        """

    async def drop(self) -> None:
        """What was taken in or handed in belongs to parameters that are gone."""

    async def start_over(self) -> None:
        """The state has been replaced by another peer's: drops all that belonged to the former one."""
