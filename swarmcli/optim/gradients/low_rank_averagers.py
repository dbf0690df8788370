"""PowerSGDGradientAverager and PowerEFGradientAverager: GradientAverager with less to send."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from swarmcli.averaging import AveragerCore, RoundResult, StepControl
from swarmcli.averaging.state.snapshot import copied
from swarmcli.network.thread import offload
from swarmcli.optim.gradients.grad_averager import GradientAverager
from swarmcli.optim.gradients.method import MethodFactory
from swarmcli.optim.gradients.poweref import PowerEF
from swarmcli.optim.gradients.powersgd import PowerSGD

logger = logging.getLogger(__name__)

LOOK = 10.0  # seconds that a newcomer's first step spends on looking for the others' state, at most
_TAG_BYTES = 32


class LowRankGradientAverager(GradientAverager):
    """What both have in common. All peers hold something alike beside their gradients (`docs/powersgd.md`), so only
    peers that have been in the same rounds average with each other.

    A newcomer, and a peer that lost sight of a round, gets it from the others when it looks for its next group, and
    what only it held (PowerSGD's residuals) is dropped then. `load_state_from_peers` does it at once.
    """

    _kind: type[PowerSGD | PowerEF]

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        averager_rank: int,
        *,
        min_compression_ratio: float = 0.5,
        **options: Any,
    ) -> None:
        """`averager_rank`: columns that each matrix is approximated with. Matrices of which less than the share
        `min_compression_ratio` would be saved, and tensors of fewer than two dimensions, are averaged as they are.
        For `options` see GradientAverager. Raises ValueError and TypeError.
        """
        self._factory = self._kind(averager_rank, min_compression_ratio)
        self._rounds = 0  # that the state shared by all is the outcome of
        self._in_step = False  # nothing points to others being further
        super().__init__(parameters, **options)

    @classmethod
    def method_factory(cls, **options: Any) -> MethodFactory:
        rank = {name: options.pop(name) for name in ("averager_rank", "min_compression_ratio") if name in options}
        if "averager_rank" not in rank:
            raise TypeError(f"grad_averager: {cls.__name__}.get_factory needs averager_rank")
        super().method_factory(**options)
        return cls._kind(**rank)

    def schedule_step(self, scheduled_time: float | None = None, **step_options: Any) -> StepControl:
        """See GradientAverager. The outcome of the last step must be known: it says with whom this one is."""
        with self._at_rest():
            pass
        if not self._in_step:
            self.load_state_from_peers(timeout=LOOK)
            self._in_step = True
        return super().schedule_step(scheduled_time, **step_options)

    def get_current_state(self) -> tuple[Any, Sequence[torch.Tensor]]:
        """What all peers hold alike. Not the averaged tensors, which mean nothing between rounds."""
        with self.get_tensors():
            return {"rounds": self._rounds, "tag": self._tag}, list(copied(dict(self._method.shared)).values())

    # Inside

    def _take_in_outcome(self) -> None:
        rounds, waiting = self._rounds, self._last is not None
        super()._take_in_outcome()
        if waiting and self._rounds == rounds:
            self._in_step = False

    def _committed(self, result: RoundResult) -> None:
        self._rounds += 1
        self._tag = hashlib.sha256(b"swarm low rank" + self._tag + result.group.group_id).digest()
        rounds, tag, priority = self._rounds, self._tag, self._state_sharing_priority
        self._runner.call(lambda core: core.declare_state(priority=priority, epoch=rounds, tag=tag), wait=False)

    async def _load_state(self, core: AveragerCore, timeout: float | None) -> tuple[Any, list[torch.Tensor]] | None:
        state = await super()._load_state(core, timeout)
        if state is not None:
            async with core.tensors():
                await offload(self._adopt, *state)
        return state

    def _adopt(self, metadata: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Takes over what others hold, if they are further. A stranger's word: what does not fit is not taken."""
        rounds, tag = (metadata.get(key) if isinstance(metadata, dict) else None for key in ("rounds", "tag"))
        own = list(self._method.shared.values())
        fits = [(each.shape, each.dtype) for each in tensors] == [(each.shape, each.dtype) for each in own]
        if not (isinstance(rounds, int) and isinstance(tag, bytes) and len(tag) in (0, _TAG_BYTES) and fits):
            logger.warning("the state of %r that others share does not fit: it is not used", self.prefix)
        elif rounds > self._rounds:
            for mine, theirs in zip(own, tensors, strict=True):
                mine.copy_(theirs)
            self._method.reset_own()
            self._rounds, self._tag = rounds, tag


class PowerSGDGradientAverager(LowRankGradientAverager):
    """Sends two thin matrices in the place of each large one; what they lack stays with the peer and is sent later.

    arXiv 1905.13727; formulas and what holds of them in `powersgd.py`.
    """

    _kind = PowerSGD


class PowerEFGradientAverager(LowRankGradientAverager):
    """Corrects an estimate of the mean gradient, which all peers share, by a matrix of low rank in each round.

    EF21, arXiv 2106.05203, with PowerSGD's compression; formulas in `poweref.py`. There is nothing of a peer's own.
    """

    _kind = PowerEF
