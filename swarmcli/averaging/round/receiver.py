"""The reducer's side of its streams with the members: parts come in, averages go out, both at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress

from swarmcli.averaging.round.auditing import Audits
from swarmcli.averaging.round.buffers import Average, root_of
from swarmcli.averaging.round.faults import CommonMeans
from swarmcli.averaging.round.messages import (
    MAX_WORDS,
    AverageHeader,
    Farewell,
    OpenExchange,
    PartHeader,
    SenderTerms,
)
from swarmcli.averaging.round.pace import LaggedError, Pace
from swarmcli.averaging.round.reducer import Reducer
from swarmcli.averaging.shares import reducer_opens
from swarmcli.compression import TensorMessage
from swarmcli.concurrency import beside, forget, forgetful, unless_silent, unless_stuck
from swarmcli.errors import CallRefused, EndOfStream, InputRefused, NetworkError, ProtocolViolation, RoundFailed
from swarmcli.memory import unwritten
from swarmcli.network import Stream
from swarmcli.network.loop_thread import loop_time


class PartReceiver:
    """Serves the members of one round, each on its own stream."""

    def __init__(
        self, means: CommonMeans, audits: Audits | None, reducer: Reducer, members: list[int], pace: Pace
    ) -> None:
        """`members`: indices of the other members that send and receive. `pace`: of the parts that come in."""
        self.streams: list[Stream] = []
        self._means, self._audits, self._mates, self._options = means, audits, means.mates, means.options
        self._reducer, self._pace = reducer, pace
        self._served: set[int] = set()  # members whose streams are here
        self._waiting = {member: asyncio.Event() for member in members}  # set once it has begun, or is left out

    async def run(self) -> None:
        """Forms the averages. The reducer leaves out a member that does not begin in time, and dials one that is easier
        to dial than itself. If it fails, it says so on the streams, and all that wait for averages get RoundFailed."""
        members, me = self._mates.group.members, self._mates.me
        visiting = [member for member in self._waiting if reducer_opens(members[me], members[member])]
        async with asyncio.TaskGroup() as tasks:
            for member in visiting:
                tasks.create_task(self._visit(member))
            with suppress(RoundFailed):
                async with beside(self._watch_beginnings()):
                    await self._reducer.run()

    @forgetful
    async def serve(self, member: int, stream: Stream) -> None:
        """Takes a member's parts and sends it all averages.

        Raises CallRefused for a second stream of a member, for a member with another plan, and if the round has failed;
        NetworkError or TimeoutError if the member is lost. From there on the reducer leaves it out.
        """
        if member not in self._waiting or member in self._served:
            raise CallRefused("twice", "this member has a stream of this round already, or needs none")
        self._served.add(member)
        self.streams.append(stream)
        try:
            terms = await self._agree(member, stream)
            # Averages go out while parts still come in, and even after the parts end in an error: a member that is left
            # out still gets the result.
            async with beside(self._collect(member, terms, stream)):
                await self._distribute(stream)
        except RoundFailed as error:
            raise CallRefused("failed", error.reason) from error
        finally:
            self._leave_out(member, "its connection ended")

    async def _visit(self, member: int) -> None:
        """Opens the stream to a member that is easier to dial than this reducer."""
        mates, patience = self._mates, self._options.for_reducer
        request, method = OpenExchange(mates.group.group_id, True, mates.group.listed), mates.method("exchange")
        try:
            async with mates.endpoint.stream(mates.peer(member), method, request, timeout=patience) as stream:
                await self.serve(member, stream)
                # The member closes the stream once it has read what was sent.
                await stream.finish()
                with suppress(EndOfStream):
                    async with asyncio.timeout(patience):
                        while True:
                            await stream.receive(PartHeader)  # from a sender that does not know yet that it is left out
        except (NetworkError, TimeoutError) as error:
            if member not in self._served:
                self._leave_out(member, f"the reducer could not reach it: {error}")
            forget(error)

    @forgetful
    async def _watch_beginnings(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for member in self._waiting:
                tasks.create_task(self._await_beginning(member))
        self._means.tempo.note_all_begun()

    @forgetful
    async def _await_beginning(self, member: int) -> None:
        """Waits until a member has begun, or is left out. A member that still computes has its time; one that takes
        part, or gives no answer, is too slow if its parts would be. Once half of the reducers are done, nobody still
        computes: they have had the member's parts, or have given it up, and the others wait for this reducer."""
        waiting, tempo, ends = self._waiting, self._means.tempo, loop_time() + self._options.to_begin
        asking = self._mates.until_gone(member, tempo.begun)
        async with beside(waiting[member].wait()) as begun, beside(asking) as gone:
            while not waiting[member].is_set():
                pause = min(tempo.patience / 2, max(0.0, ends - loop_time()))
                await asyncio.wait([begun, gone], timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                if tempo.half_averaged:
                    tempo.begun.setdefault(member, loop_time())
                slow = loop_time() - tempo.begun.get(member, math.inf) >= tempo.patience
                absent = sum(not each.is_set() for each in waiting.values())
                if gone.done():
                    self._leave_out(member, gone.result())
                elif loop_time() >= ends:
                    if not self._mates.is_connected(member):
                        self._means.faults.lost.add(member)
                    self._give_up(member, f"it did not begin within {self._options.to_begin:g} s")
                elif slow and 2 * absent <= 1 + len(waiting):
                    self._give_up(member, "it was too slow: its parts had not begun to come when those of others had")

    def _leave_out(self, member: int, reason: str) -> None:
        self._reducer.leave_out(member, reason)
        self._waiting[member].set()

    def _give_up(self, member: int, reason: str) -> None:
        self._means.tempo.slow[member] = reason
        self._suspect(member, reason)

    def _suspect(self, member: int, reason: str) -> None:
        self._means.faults.suspects.setdefault(member, reason)
        self._leave_out(member, reason)

    async def _agree(self, member: int, stream: Stream) -> SenderTerms:
        """Receives a member's first message. A member with another plan could read averages wrongly, so it gets
        none."""
        async with asyncio.timeout(self._options.to_begin):
            terms, _ = await stream.receive(SenderTerms)
        if terms.plan != self._means.plan.fingerprint:
            reason = "its tensors, shares or options differ from the group's"
            self._refuse(member, reason)
            raise CallRefused("plan", reason)
        return terms

    def _refuse(self, member: int, reason: str) -> None:
        self._means.faults.refused[member] = reason
        self._leave_out(member, reason)

    @forgetful
    async def _collect(self, member: int, terms: SenderTerms, stream: Stream) -> None:
        try:
            await self._take_parts(member, terms, stream)
        except (InputRefused, ProtocolViolation) as error:
            self._refuse(member, str(error)[:MAX_WORDS])
        except TimeoutError:
            self._suspect(member, "it fell silent")
        except LaggedError as error:
            self._give_up(member, str(error))
        except NetworkError as error:
            if self._mates.lost_with(member, stream):
                self._means.faults.cut.add(member)
            self._leave_out(member, f"its connection ended: {error}"[:MAX_WORDS])

    @forgetful
    async def _take_parts(self, member: int, terms: SenderTerms, stream: Stream) -> None:
        if member in self._reducer.left_out:
            return  # it comes too late
        audits, tempo = self._audits, self._means.tempo
        if audits is not None:
            audits.begin(member, terms.commitment)
        self._reducer.begin(member, terms.weight, terms.samples, terms.note)
        self._waiting[member].set()
        silence = self._options.for_silence(self._mates.endpoint.round_trip(stream.peer))
        positions = range(len(self._reducer.parts) if terms.weight > 0 else 0)
        # One piece of memory for all parts of this member: `add` returns when it is free again. Its size comes from the
        # plan, never from the member's word.
        scratch = unwritten(max(map(self._payload_bound, positions), default=0))
        expected, before = sum(map(self._payload_bound, positions)), stream.arriving
        began = tempo.begun[member] = loop_time()

        def come() -> float:
            return (stream.arriving - before) / max(1, expected)

        whole = False
        try:
            async with self._pace.keeping_up(member, come):
                for position in positions:
                    async with unless_silent(stream, silence):
                        header, payload = await stream.receive(PartHeader, self._memory_for(position, scratch))
                    message = TensorMessage(header.tensor, (payload,))
                    if audits is not None:  # before it is in the sum, for which this reducer signs
                        part = self._reducer.parts[position]
                        await audits.check(part, member, terms.weight, header.signature, message)
                    await self._reducer.add(member, message)
            whole = True
        finally:
            # The fraction that has arrived tells how long the rest would take.
            if positions and not self._mates.lost_with(member, stream):
                seconds = loop_time() - began
                tempo.sending[member] = seconds if whole else seconds / min(1.0, max(come(), 1e-6))
        with suppress(EndOfStream):
            await stream.receive(PartHeader, _one_part_too_many)

    def _memory_for(self, position: int, scratch: memoryview) -> Callable[[PartHeader, int], memoryview]:
        def into(header: PartHeader, size: int) -> memoryview:
            if size > self._payload_bound(position):
                raise ProtocolViolation(f"part {self._reducer.parts[position].index} has {size} bytes")
            return scratch[:size]

        return into

    def _payload_bound(self, position: int) -> int:
        return self._reducer.parts[position].payload_bound

    async def _distribute(self, stream: Stream) -> None:
        averages = list[Average]()
        for position in range(len(self._reducer.parts)):
            average = await self._reducer.average(position)
            averages.append(average)
            message = average.message
            tensor = None if message is None else message.header
            header = AverageHeader(tensor, average.senders, average.weights, average.inputs or None)
            async with unless_stuck(stream, self._options.for_reducer):
                await stream.send(header, () if message is None else message.payload)
        signed = self._means.signed.sign(self._mates.me, self._mates.endpoint.identity, root_of(averages))
        async with asyncio.timeout(self._options.for_reducer):
            await stream.send(Farewell(self._reducer.left_out, signed))


def _one_part_too_many(header: PartHeader, size: int) -> memoryview:
    raise InputRefused("it sent more parts than the plan provides for")
