"""Local updates: every peer steps by itself at every batch, and states are averaged after the epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from swarmcli.averaging import AveragerCore
from swarmcli.optim.gradients.accumulator import Weighed, all_finite, lent
from swarmcli.optim.modes.base import GivenUp, Mode, Timing
from swarmcli.optim.state.replica import Replica

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerConfig
    from swarmcli.dht import DHTNode
    from swarmcli.optim.config import PeerContext
    from swarmcli.optim.modes.base import CommittedRound, EpochWork, SiteHooks, Trained
    from swarmcli.optim.state.lineage import LineagePosition

ROUND_TENSOR = torch.zeros(1)  # what rounds average: one number stands for the gradients that nobody averages


@dataclass(frozen=True, kw_only=True)
class LocalUpdates(Mode):
    """Peers differ by design, so their lineage counts epochs, and states are averaged regularly, by samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        unused = {
            "reuse_grad_buffers=True": (self.reuse_grad_buffers, "nothing accumulates"),
            "delay_grad_averaging=True": (self.timing is Timing.DELAYED_AVERAGING, "no gradients are averaged"),
            "use_ext_grad_buffer=True": (self.share_gradients, "there is no average gradient"),
        }
        for option, (given, reason) in unused.items():
            if given:
                raise ValueError(f"{option} has no use in local updates (grad_averager=None): {reason}")

    @property
    def averages_gradients(self) -> bool:
        return False

    def state_weight(self, weight: float) -> float:
        return weight

    def build(self, peer: PeerContext, trained: Trained, site: SiteHooks) -> EpochWork:
        replica = Replica(trained.state(peer.config.run_id), trained.placement, site.companions)
        return LocalWork(self, peer, replica)

    def assisting_averager(
        self,
        node: DHTNode,
        config: AveragerConfig,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor] = (),
    ) -> AveragerCore:
        return AveragerCore([ROUND_TENSOR.clone()], node, config)


class LocalWork:
    """EpochWork whose rounds only agree that the epoch is over and who brought how many samples.

    The parameters of peers differ meanwhile; they are brought together by the averaging of states that follows the
    epochs (StateKeeper). So an epoch ends even where that fails, and training need not wait for it. The lineage
    counts epochs: there is no round of gradients that somebody could make up for.
    """

    replays = False

    def __init__(self, mode: Mode, peer: PeerContext, replica: Replica) -> None:
        self.replica = replica
        self.averager = AveragerCore([ROUND_TENSOR.clone()], peer.node, peer.averaging)
        self._mode = mode
        self._target = peer.config.target_batch_size
        self.given_up = GivenUp(peer.events)
        self._learned = Weighed()  # in steps since the last round
        self._handed: Weighed | None = None  # on its way; None: nothing is

    @property
    def samples(self) -> int:
        return self._learned.samples

    async def accumulate(self, batch_size: int, scale: float | None = None, weight: float | None = None) -> None:
        """One step of the optimizer with the gradients of the model's parameters, unless one is not finite.

        Such a batch is dropped, and only that: what was learned from those before it stays. One without weight makes
        no step.
        """
        batch = Weighed.of(batch_size, weight)
        gradients = (parameter.grad for parameter in self.replica.placement.model_parameters)
        if batch.weight and not all_finite(gradient for gradient in gradients if gradient is not None):
            self.given_up.note(batch_size, scale)
            return
        self.given_up.end()
        if batch.weight:
            await self.replica.change(partial(self._step, scale or 1.0))
            await self.replica.publish()
        self._learned += batch

    def _step(self, scale: float) -> None:
        place = self.replica.placement
        place.check()
        pairs = zip(place.model_parameters, place.state_parameters, strict=True)
        used = [(state, model.grad) for model, state in pairs if model.grad is not None]
        gradients = [gradient if scale == 1.0 else gradient / scale for _, gradient in used]
        with lent([state for state, _ in used], gradients):
            self.replica.state.step_optimizer()

    async def freeze(self) -> Weighed:
        if self._handed is None:
            self._handed, self._learned = self._learned.in_round, Weighed()
        return self._handed

    async def restore(self) -> None:
        self._learned += self._handed or Weighed()
        self._handed = None

    async def set_aside(self) -> None:
        """The model has learned from these samples, whether the round has counted them or not."""
        self._handed = None

    async def average_alone(self) -> None:
        """There is nothing to average."""

    async def advance(self, committed: CommittedRound) -> None:
        """The next epoch begins with the parameters as they are."""
        following = self._mode.after(self.replica.position, committed, self._target)
        await self.replica.change(partial(self.replica.state.end_epoch, following))
        self._handed = None

    async def replay(self, averages: Sequence[torch.Tensor], committed: CommittedRound) -> None:
        """Not to be called, as `replays` says: the others' steps cannot be made up for."""
        raise RuntimeError("with local updates no round holds what the others have learned: the state is downloaded")

    async def pass_by(self, wanted: LineagePosition) -> bool:
        passed = await self.replica.pass_by(wanted, lambda position: position.by_epoch(self._target))
        if passed:
            await self.drop()
        return passed

    async def drop(self) -> None:
        self._learned, self._handed = Weighed(), None

    async def start_over(self) -> None:
        await self.drop()
