"""Rounds in which peers average their training states, beside those of the gradients, under a prefix of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from swarmcli.averaging import AveragerCore, RoundRequest
from swarmcli.errors import SwarmError
from swarmcli.events import Noticed
from swarmcli.network.identity import PeerID
from swarmcli.optim.state.replica import Replica
from swarmcli.optim.state.state_buffers import StateBuffers, extra_slots, parameter_slots, statistic_slots

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerConfig, StepControl
    from swarmcli.dht import DHTNode


class StateAveraging:
    """One round at a time: `begin` takes a copy and returns, `apply` changes the state, for its caller to choose when.

    A round that fails changes nothing; the event Noticed says why, and everyone goes on with the state that he has.
    """

    def __init__(
        self,
        node: DHTNode,
        config: AveragerConfig,
        replica: Replica,
        statistics: Sequence[str] = (),
        terms: Mapping[str, str] | None = None,
    ) -> None:
        """`config` is that of the state's averager. Raises OptimizerError for statistics that cannot be averaged."""
        state = replica.state
        self._node = node
        self._replica = replica
        self._buffers = StateBuffers(
            [
                *parameter_slots(state.parameters),
                *statistic_slots(state.parameters, state.optimizer, statistics),
                *extra_slots(state.extra_tensors),
            ]
        )
        config = replace(config, allreduce=replace(config.allreduce, tensor_infos=self._buffers.infos))
        self._patience = config.matchmaking.min_matchmaking_time
        self._averager = AveragerCore(self._buffers.tensors, node, config)
        self._terms = dict(terms or {})
        self._control: StepControl | None = None  # of the round under way, or of one that has not been applied
        self._epoch = 0  # of that round

    async def start(self) -> None:
        await self._averager.start()

    async def shutdown(self) -> None:
        """Leaves the round under way. Idempotent; leaves no task."""
        self.drop()
        await self._averager.shutdown()

    @property
    def is_under_way(self) -> bool:
        """Whether a round has begun that has not been applied."""
        return self._control is not None

    async def begin(self, tag: bytes, epoch: int, weight: float, mates: Iterable[PeerID], *, changes: bool) -> None:
        """Copies the state as it is now and has it averaged with that of `mates`, and of others with this tag.

        `changes`: the state may change until `apply`. A round that was never applied is given up.
        """
        self.drop()
        async with self._averager.tensors():
            await self._replica.change(partial(self._buffers.load, changes=changes))
        self._averager.expect(mates)
        request = RoundRequest(tag=tag, weight=weight, timeout=self._patience, epoch=epoch, terms=self._terms)
        self._control, self._epoch = self._averager.begin_round(request), epoch

    async def apply(self, *, wait: bool) -> bool:
        """Moves the state by the delta rule if the round has ended, or once it has. Whether there was an average."""
        control = self._control
        if control is None or not (wait or control.done()):
            return False
        reason = await _ended(control)
        if control is not self._control:
            return False  # another call has applied it, or the state was replaced
        self._control = None
        if reason:
            text = f"the states were not averaged after epoch {self._epoch}, each peer keeps its own: {reason}"
            self._node.endpoint.events.emit(Noticed("warning", text))
            return False
        async with self._averager.tensors():
            await self._replica.change(self._buffers.apply)
        return True

    def drop(self) -> None:
        """The state that is being averaged is of no use any more: leaves the round; the others go on."""
        control, self._control = self._control, None
        if control is not None:
            control.cancel()


async def _ended(control: StepControl) -> str:
    """Waits for the end of a round; why it gave no average, empty if it did."""
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
