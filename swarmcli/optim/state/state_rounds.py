"""Rounds over training states, beside those of the gradients and under a prefix of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from swarmcli.averaging import AveragerCore, RoundRequest
from swarmcli.compression import CompressionBase
from swarmcli.errors import SwarmError
from swarmcli.network.identity import PeerID
from swarmcli.optim.state.state_buffers import Slot, StateBuffers

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerConfig, StepControl
    from swarmcli.dht import DHTNode


LONGEST_WAIT = 5.0  # seconds for mates who have just ended the same epoch, and copy their states now
_TO_BEGIN = 10.0  # seconds beyond that, in which the group of those who came may begin


def state_config(run_id: str, gradients: AveragerConfig, compression: CompressionBase) -> AveragerConfig:
    """Of the states' averager: like that of the gradients, but with its own codec, and all peers in one group."""
    matchmaking = replace(
        gradients.matchmaking,
        target_group_size=None,  # what several groups part, this unites
        min_matchmaking_time=min(LONGEST_WAIT, gradients.matchmaking.min_matchmaking_time),
    )
    allreduce = replace(gradients.allreduce, compression=compression, tensor_infos=None)
    return replace(gradients, prefix=f"{run_id}_state", allreduce=allreduce, matchmaking=matchmaking)


class StateRounds:
    """One round at a time over `buffers`, which their owner fills before it begins and reads when it has ended."""

    def __init__(
        self, node: DHTNode, config: AveragerConfig, slots: Iterable[Slot], terms: Mapping[str, str] | None = None
    ) -> None:
        """Raises OptimizerError for statistics that cannot be averaged."""
        self.buffers = StateBuffers(slots)
        config = replace(config, allreduce=replace(config.allreduce, tensor_infos=self.buffers.infos))
        self.averager = AveragerCore(self.buffers.tensors, node, config)
        self._patience = config.matchmaking.min_matchmaking_time + _TO_BEGIN
        self._terms = dict(terms or {})
        self._control: StepControl | None = None  # of the round under way, or of one whose end nobody has heard yet

    async def start(self) -> None:
        await self.averager.start()

    async def shutdown(self) -> None:
        """Leaves the round under way. Idempotent; leaves no task."""
        self.drop()
        await self.averager.shutdown()

    @property
    def is_under_way(self) -> bool:
        """Whether a round has begun of which `ended` has not told."""
        return self._control is not None

    @property
    def has_ended(self) -> bool:
        """Whether `ended` would return at once."""
        return self._control is not None and self._control.done()

    def begin(self, tag: bytes, epoch: int, weight: float, mates: Iterable[PeerID] | None) -> None:
        """Averages the buffers with those of `mates`, and of others with this tag; None: those of the last round are
        expected. There must be no round under way."""
        if mates is not None:
            self.averager.expect(mates)
        request = RoundRequest(tag=tag, weight=weight, timeout=self._patience, epoch=epoch, terms=self._terms)
        self._control = self.averager.begin_round(request)

    async def ended(self) -> str | None:
        """Waits for the end of the round: why it gave no average, empty if it did; None if there was no round, or it
        was dropped meanwhile, or another call has told its end."""
        control = self._control
        if control is None:
            return None
        reason = await _reason(control)
        if control is not self._control:
            return None
        self._control = None
        return reason

    def drop(self) -> None:
        """Leaves the round under way; the others go on."""
        control, self._control = self._control, None
        if control is not None:
            control.cancel()


async def _reason(control: StepControl) -> str:
    # Not `await control`: cancelling that would cancel its future, and the round behind it would run on.
    ended = asyncio.Event()
    control.add_done_callback(lambda _: ended.set())
    await ended.wait()
    if control.cancelled():
        return "it was left"
    try:
        result = control.result(timeout=0)
    except SwarmError as error:
        return str(error)
    return "" if result.total_weight > 0 else "nobody in the group had samples"
