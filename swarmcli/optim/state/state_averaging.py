"""The averaging of a trainer's state: a copy goes into a round, and the average comes back by the delta rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from swarmcli.events import Noticed
from swarmcli.network.identity import PeerID
from swarmcli.optim.state.replica import Replica
from swarmcli.optim.state.state_buffers import Slot, extra_slots, parameter_slots, statistic_slots
from swarmcli.optim.state.state_rounds import StateRounds

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerConfig
    from swarmcli.dht import DHTNode


def state_slots(
    parameters: Sequence[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    statistics: Sequence[str],
    extra_tensors: Sequence[torch.Tensor],
) -> Iterator[Slot]:
    """What the peers of a run average of their states, in the order that all of them have."""
    yield from parameter_slots(parameters)
    yield from statistic_slots(parameters, optimizer, statistics)
    yield from extra_slots(extra_tensors)


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
        slots = state_slots(state.parameters, state.optimizer, statistics, state.extra_tensors)
        self._events = node.endpoint.events
        self._replica = replica
        self._rounds = StateRounds(node, config, slots, terms)
        self._epoch = 0  # of the round

    async def start(self) -> None:
        await self._rounds.start()

    async def shutdown(self) -> None:
        """Leaves the round under way. Idempotent; leaves no task."""
        await self._rounds.shutdown()

    @property
    def is_under_way(self) -> bool:
        """Whether a round has begun that has not been applied."""
        return self._rounds.is_under_way

    async def begin(
        self, tag: bytes, epoch: int, weight: float, mates: Iterable[PeerID] | None, *, changes: bool
    ) -> None:
        """Copies the state as it is now and has it averaged with that of `mates`, and of others with this tag.

        None: the members of the last round are expected.
        `changes`: the state may change until `apply`. A round that was never applied is given up.
        """
        self._rounds.drop()
        await self._replica.gather()
        async with self._rounds.averager.tensors():
            await self._replica.change(partial(self._rounds.buffers.load, changes=changes))
        self._rounds.begin(tag, epoch, weight, mates)
        self._epoch = epoch

    async def apply(self, *, wait: bool) -> bool:
        """Moves the state by the delta rule if the round has ended, or once it has. Whether there was an average."""
        if not (wait or self._rounds.has_ended):
            return False
        reason = await self._rounds.ended()
        if reason is None:
            return False  # there was none, another call has applied it, or the state was replaced
        if reason:
            text = f"the states were not averaged after epoch {self._epoch}, each peer keeps its own: {reason}"
            self._events.emit(Noticed("warning", text))
            return False
        await self._replica.gather()
        async with self._rounds.averager.tensors():
            await self._replica.change(self._rounds.buffers.apply)
        return True

    def drop(self) -> None:
        """The state that is being averaged is of no use any more: leaves the round; the others go on."""
        self._rounds.drop()
