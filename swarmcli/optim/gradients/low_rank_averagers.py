"""PowerSGDGradientAverager and PowerEFGradientAverager: GradientAverager with less to send."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from swarmcli.averaging import AveragerCore, AveragingStage, RoundResult, StepControl
from swarmcli.network.loop_thread import offload
from swarmcli.optim.gradients.accumulator import GradientAccumulator
from swarmcli.optim.gradients.grad_averager import GradientAverager
from swarmcli.optim.gradients.low_rank_methods import LowRankMethod, PowerEFMethod, PowerSGDMethod, Rank
from swarmcli.state.snapshot import copied

logger = logging.getLogger(__name__)

_TRIES, _TAG_BYTES = 3, 32


class LowRankGradientAverager(GradientAverager):
    """The base of both. Beside their gradients all peers hold equal tensors (`docs/powersgd.md`), so only peers that
    have been in the same rounds average with each other.

    A newcomer, or a peer that could not learn a round's outcome, downloads them from the others when it looks for its
    next group, and drops what only it holds (PowerSGD's residuals). `load_state_from_peers` does that at once.
    """

    _kind: type[LowRankMethod]

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        averager_rank: int,
        *,
        min_compression_ratio: float = 0.5,
        **options: Any,
    ) -> None:
        """`averager_rank`: columns of the approximation of each matrix. Matrices that would save less than the share
        `min_compression_ratio`, and tensors of fewer than two dimensions, are averaged as they are. GradientAverager
        explains `options`. Raises ValueError and TypeError.
        """
        self._rank = Rank(averager_rank, min_compression_ratio)
        self._state_epoch = 0  # rounds so far: the shared tensors are their outcome
        super().__init__(parameters, **options)

    def schedule_step(self, scheduled_time: float | None = None, **step_options: Any) -> StepControl:
        """See GradientAverager. Raises RuntimeError while the last step is under way: its outcome decides with whom
        this one averages."""
        with self._at_rest():
            pass
        for _ in range(_TRIES):  # the others may end another round while this peer downloads
            if not self._others_are_further():
                break
            self.load_state_from_peers(timeout=60.0)
        return super().schedule_step(scheduled_time, **step_options)

    def get_current_state(self) -> tuple[Any, Sequence[torch.Tensor]]:
        """Returns the tensors that all peers hold alike, not the averaged ones, which mean nothing between rounds."""
        with self.get_tensors():
            return {"rounds": self._state_epoch, "tag": self._tag}, list(copied(dict(self._method.shared)).values())

    # Inside

    def _make_method(self, accumulator: GradientAccumulator) -> LowRankMethod:
        return self._kind(accumulator.means, self._rank)

    def _wait_for(self, control: StepControl) -> RoundResult | None:
        """Waits for the round's result; None if the others are further: they form groups of their own, and this peer
        would wait for ever."""
        while True:
            try:
                return control.result(timeout=2.0)
            except TimeoutError:
                if control.stage is AveragingStage.LOOKING_FOR_GROUP and self._others_are_further():
                    logger.warning(
                        "the others of %r are further: this step is given up, the next follows them", self.prefix
                    )
                    control.cancel()
                    return None

    def _others_are_further(self) -> bool:
        offers = self._runner.run(lambda core: core.sharing.donors())
        return any(offer.epoch > self._state_epoch for _, offer in offers)

    def _committed(self, result: RoundResult) -> None:
        self._state_epoch += 1
        self._tag = hashlib.sha256(b"swarm low rank" + self._tag + result.round_id).digest()
        self.state_sharing_priority = self._state_sharing_priority  # declares the new `_state_epoch` to newcomers

    async def _load_state(self, core: AveragerCore, timeout: float | None) -> tuple[Any, list[torch.Tensor]] | None:
        state = await super()._load_state(core, timeout)
        if state is not None:
            async with core.tensors():
                await offload(self._adopt, *state)
            self._declare(core)
        return state

    def _adopt(self, metadata: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Takes over what others hold, if they are further and it fits: it is a stranger's word."""
        rounds, tag = (metadata.get(key) if isinstance(metadata, dict) else None for key in ("rounds", "tag"))
        own = list(self._method.shared.values())
        fits = [(each.shape, each.dtype) for each in tensors] == [(each.shape, each.dtype) for each in own]
        if not (isinstance(rounds, int) and isinstance(tag, bytes) and len(tag) in (0, _TAG_BYTES) and fits):
            logger.warning("the state of %r that others share does not fit: it is not used", self.prefix)
        elif rounds > self._state_epoch:
            for mine, theirs in zip(own, tensors, strict=True):
                mine.copy_(theirs)
            self._method.reset_own()
            self._state_epoch, self._tag = rounds, tag


class PowerSGDGradientAverager(LowRankGradientAverager):
    """Sends two thin matrices in place of each large one; what they lack stays with the peer, and it sends that later.

    arXiv 1905.13727; `PowerSGDMethod` has the formulas.
    """

    _kind = PowerSGDMethod


class PowerEFGradientAverager(LowRankGradientAverager):
    """Corrects an estimate of the mean gradient, which all peers share, by a matrix of low rank in each round.

    EF21 (arXiv 2106.05203) with PowerSGD's compression; `PowerEFMethod` has the formulas. No peer
    has anything of its own.
    """

    _kind = PowerEFMethod
