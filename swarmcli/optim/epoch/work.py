"""What a peer does in an epoch, whichever way the run trains: the seam between modes and the end of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerCore
    from swarmcli.optim.epoch.group import Committed
    from swarmcli.optim.peers.lineage import Standing
    from swarmcli.optim.state.replica import Replica


class EpochWork(Protocol):
    """Takes in batches, brings something to the round that ends the epoch, and steps with the outcome.

    Its coroutines exclude each other where they must: `accumulate` may be called while what was frozen is on its way.
    """

    replica: Replica  # what steps
    averager: AveragerCore  # whose standing group ends the epoch
    replays: bool  # whether a round that one group committed, and this peer missed, can be made up for with `replay`

    @property
    def samples(self) -> int:
        """Accumulated for the next round; those frozen to the present one are not among them."""

    @property
    def overflows(self) -> int:
        """How often a batch, or all that had been accumulated, was given up because gradients were not finite."""

    async def accumulate(self, batch_size: int, scale: float | None = None) -> None:
        """The present gradients of the parameters, means over `batch_size` samples. ValueError: they do not fit.

        A batch with a gradient that is not finite is dropped, and `overflows` counts it. With `scale` the losses were
        multiplied by it; then all that this peer has accumulated for the round may be given up with it.
        """

    async def freeze(self) -> int:
        """Fixes what the averager averages, and returns its weight, in samples.

        What is accumulated from now on belongs to the next round. Called again before the outcome is known, it changes
        nothing and returns the same.
        """

    async def restore(self) -> None:
        """No round used what was frozen: it counts for the next one. Without effect if nothing was."""

    async def average_alone(self) -> None:
        """What was frozen becomes the average, as in a round with nobody else."""

    async def advance(self, committed: Committed, counted: bool) -> None:
        """Steps with the averager's tensors; from here on the replica is at the next epoch of the next lineage.

        `counted`: this peer's part is in the average. Nothing is frozen any more.
        """

    async def replay(self, averages: Sequence[torch.Tensor], round_id: bytes, samples: int) -> None:
        """Steps with a round that this peer missed; what it accumulated or froze, of former parameters, is dropped."""

    async def pass_by(self, wanted: Standing) -> bool:
        """Goes to `wanted` with the parameters as they are, where lineages only count epochs.

        What was accumulated or frozen, of epochs that are over, is dropped. False, and nothing changed: it leads
        elsewhere.
        """

    async def drop(self) -> None:
        """What was accumulated or frozen belongs to parameters that are gone."""

    async def start_over(self) -> None:
        """The state has been replaced by another peer's: drops all that belonged to the former one."""
