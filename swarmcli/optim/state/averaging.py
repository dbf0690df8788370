"""The averaging of a trainer's state: volume by volume it goes into rounds, and comes back by the delta rule."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from swarmcli.errors import SwarmError
from swarmcli.events import Noticed
from swarmcli.network.task_owner import TaskOwner
from swarmcli.optim.state.replica import Replica
from swarmcli.optim.state.rounds import Occasion, StateRounds
from swarmcli.optim.state.volumes import VOLUME_BYTES, Volume, state_slots
from swarmcli.tasks import forgetful, on_executor

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerConfig
    from swarmcli.dht import DHTNode


@dataclass(slots=True)
class _Passage:
    """All volumes of one state on their way. A volume that is done with leaves the lists, and its memory goes with it.

    changes   the state may change meanwhile: volumes are copies of the moment when it began, and what has been averaged
              waits for `apply`, since a model may be computing with the parameters
    waiting   volumes whose round has not begun
    averaged  volumes that wait for `apply`
    applied   whether any has been applied that `apply` has not told of
    """

    occasion: Occasion
    changes: bool
    generation: int  # of the state; a later one is another state
    waiting: list[Volume]
    averaged: list[Volume] = field(default_factory=list)
    applied: bool = False
    error: SwarmError | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)


class StateAveraging:
    """One averaging at a time: `begin` returns at once, `apply` changes the state, for its caller to choose when.

    A volume whose round fails changes nothing, and no other follows it: the members that failed with this peer have
    stopped as well, so whoever went on would wait for mates in vain, volume after volume. What came before it stays
    averaged: the delta rule is right for each element by itself. The event Noticed says why, and everyone goes on with
    the state that he has.
    """

    def __init__(
        self,
        node: DHTNode,
        config: AveragerConfig,
        replica: Replica,
        statistics: Sequence[str] = (),
        terms: Mapping[str, str] | None = None,
        *,
        volume_bytes: int = VOLUME_BYTES,
    ) -> None:
        """`config` is that of the state's averager; `volume_bytes` must be alike at all peers.

        Raises OptimizerError for statistics that cannot be averaged.
        """
        state = replica.state
        slots = state_slots(state.parameters, state.optimizer, statistics, state.extra_tensors)
        self._events = node.endpoint.events
        self._replica = replica
        self._rounds = StateRounds(node, config, slots, terms, volume_bytes=volume_bytes)
        self._tasks = TaskOwner()  # of one averaging at most
        self._task: asyncio.Task[None] | None = None
        self.passage: _Passage | None = None  # that under way, or one of whose end `apply` has not told

    async def start(self) -> None:
        await self._rounds.averager.start()

    async def shutdown(self) -> None:
        """Leaves the round under way. Idempotent; leaves no task."""
        await self._abandon()
        await self._rounds.averager.shutdown()

    async def begin(self, occasion: Occasion, *, changes: bool) -> None:
        """Averages the state as it is now with that of its mates, and of others with its tag, in the background.

        `changes`: the state may change until `apply`, so all of it is copied here; otherwise a volume is copied when
        its turn comes. What was never applied is given up. OptimizerError: statistics that cannot be averaged.
        """
        await self._abandon()
        await self._replica.gather()
        volumes = self._rounds.volumes()
        if changes:
            await self._replica.change(lambda: [volume.pin() for volume in volumes])
        self.passage = _Passage(occasion, changes, self._replica.generation, volumes)
        self._task = self._tasks.spawn(self._pass(self.passage))

    async def apply(self, *, wait: bool = False) -> bool:
        """Moves the state by the delta rule where rounds have ended; with `wait`, once all have. Whether it is another
        state for an average. Raises SiteError if a process that has a part of the state is gone."""
        passage = self.passage
        if passage is None:
            return False
        if wait:
            await passage.over.wait()
        applied, passage.applied = passage.applied, False
        if passage.averaged:
            await self._replica.gather()
        # Each change waits for the replica's lock, and `drop` or another `apply` may come meanwhile.
        while passage.averaged and passage is self.passage:
            applied = True
            await self._change(passage, passage.averaged.pop(0).apply)
        if passage is not self.passage:
            return False  # another call has told of it, or the state was replaced
        if passage.over.is_set():
            self.passage = None
        if passage.error is not None:
            raise passage.error
        return applied

    def drop(self) -> None:
        """The state that is being averaged is of no use any more: leaves the round; the others go on."""
        passage, self.passage = self.passage, None
        if passage is not None:
            passage.waiting.clear()
            passage.averaged.clear()
            passage.over.set()
        if self._task is not None:
            self._task.cancel()

    async def _abandon(self) -> None:
        self.drop()
        await self._tasks.close()

    async def _pass(self, passage: _Passage) -> None:
        """Brings one volume after the other to its end."""
        count = len(passage.waiting)
        try:
            for number in range(count):
                reason = await self._average(passage, number)
                if reason:
                    rest = f"volumes {number + 1} to {count} of {count} of the states" if number else "the states"
                    after = f"after epoch {passage.occasion.epoch}, each peer keeps its own: {reason}"
                    self._events.emit(Noticed("warning", f"{rest} were not averaged {after}"))
                    break
        except SwarmError as error:
            passage.error = error
        finally:
            passage.waiting.clear()
            passage.over.set()

    @forgetful
    async def _average(self, passage: _Passage, number: int) -> str:
        """One volume. Why there was no average of it, if there was none."""
        volume = passage.waiting.pop(0)
        reason = await self._rounds.average(passage.occasion, number, volume, partial(self._fill, passage, volume))
        if reason:
            return reason
        if passage.changes:
            passage.averaged.append(volume)
            return ""
        if number == 0:
            await self._replica.gather()
        await self._change(passage, volume.apply)
        passage.applied = True
        return ""

    async def _fill(self, passage: _Passage, volume: Volume) -> None:
        if passage.changes:
            await on_executor(volume.nbytes, volume.fill)
        else:
            await self._replica.change(volume.fill)

    async def _change(self, passage: _Passage, action: Callable[[], None]) -> None:
        """Unless the state has been replaced by another one."""

        def act() -> None:  # asks under the lock: before it, a download could still come between
            if passage.generation == self._replica.generation:
                action()

        await self._replica.change(act)
