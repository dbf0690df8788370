"""The work of an epoch in which every peer steps by itself, with its own gradients, at every batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from swarmcli.averaging import AveragerCore
from swarmcli.optim.epoch.group import Committed
from swarmcli.optim.epoch.work import GivenUp
from swarmcli.optim.grad_scaler import all_finite
from swarmcli.optim.membership.lineage import Standing
from swarmcli.optim.state.replica import Replica
from swarmcli.optim.state.training_state import lent

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerConfig
    from swarmcli.dht import DHTNode
    from swarmcli.optim.config import OptimizerConfig


def local_averager(node: DHTNode, config: AveragerConfig) -> AveragerCore:
    """Whose rounds end the epochs: one number stands for the gradients that nobody averages."""
    return AveragerCore([torch.zeros(1)], node, config)


class LocalWork:
    """EpochWork whose rounds only agree that the epoch is over and who brought how many samples.

    The parameters of peers differ meanwhile; they are brought together by the averaging of states that follows the
    epochs (StateKeeper). So an epoch ends even where that fails, and training need not wait for it. The lineage
    counts epochs: there is no round of gradients that somebody could make up for.
    """

    replays = False

    def __init__(
        self, node: DHTNode, config: OptimizerConfig, averager_config: AveragerConfig, replica: Replica
    ) -> None:
        self.averager = local_averager(node, averager_config)
        self._target = config.target_batch_size
        self._replica = replica
        self._losses = GivenUp(node.endpoint.events)
        self._samples = 0
        self._handed: int | None = None  # samples on their way; None: nothing is

    @property
    def samples(self) -> int:
        return self._samples

    @property
    def overflows(self) -> int:
        return self._losses.count

    async def take_in(self, batch_size: int, scale: float | None = None) -> None:
        """One step of the optimizer with the gradients of the model's parameters, unless one is not finite.

        Such a batch is dropped, and only that: what was learned from those before it stays.
        """
        if batch_size <= 0:
            raise ValueError(f"batch_size={batch_size!r}: expected a positive number of samples")
        gradients = (parameter.grad for parameter in self._replica.placement.model_parameters)
        if not all_finite(gradient for gradient in gradients if gradient is not None):
            self._losses.note(batch_size, scale)
            return
        self._losses.end()
        await self._replica.change(partial(self._step, scale or 1.0))
        await self._replica.publish()
        self._samples += batch_size

    def _step(self, scale: float) -> None:
        place = self._replica.placement
        place.check()
        pairs = zip(place.model_parameters, place.state_parameters, strict=True)
        used = [(state, model.grad) for model, state in pairs if model.grad is not None]
        gradients = [gradient if scale == 1.0 else gradient / scale for _, gradient in used]
        with lent([state for state, _ in used], gradients):
            self._replica.state.optimizer.step()

    async def hand_in(self) -> int:
        if self._handed is None:
            self._handed, self._samples = self._samples, 0
        return self._handed

    async def take_back(self) -> None:
        self._samples += self._handed or 0
        self._handed = None

    async def average_alone(self) -> None:
        """There is nothing to average."""

    async def advance(self, committed: Committed, counted: bool) -> None:
        """The next epoch begins with the parameters as they are."""
        await self._replica.change(self._end_epoch)
        self._handed = None

    def _end_epoch(self) -> None:
        state = self._replica.state
        state.end_epoch(state.standing.by_epoch(self._target))

    async def replay(self, averages: Sequence[torch.Tensor], round_id: bytes, samples: int) -> None:
        """Not to be called, as `replays` says: the others' steps cannot be made up for."""
        raise RuntimeError("with local updates no round holds what the others have learned: the state is downloaded")

    async def pass_by(self, wanted: Standing) -> bool:
        passed = await self._replica.pass_by(wanted, lambda standing: standing.by_epoch(self._target))
        if passed:
            await self.drop()
        return passed

    async def drop(self) -> None:
        self._samples, self._handed = 0, None

    async def start_over(self) -> None:
        await self.drop()
