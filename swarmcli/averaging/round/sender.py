"""A member's side of its streams with the reducers: parts go out, averages come in, both at once."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence

from swarmcli.averaging.aggregators.base import largest
from swarmcli.averaging.audit.signed import digest_of
from swarmcli.averaging.config import MAX_WEIGHT, MIN_WEIGHT, TO_OPEN
from swarmcli.averaging.round.auditing import Audits
from swarmcli.averaging.round.buffers import Average, Inputs, Results, plain, root_of
from swarmcli.averaging.round.faults import CommonMeans
from swarmcli.averaging.round.messages import (
    AverageHeader,
    Farewell,
    OpenExchange,
    PartHeader,
    SenderTerms,
)
from swarmcli.averaging.round.pace import LaggedError, Pace
from swarmcli.averaging.round.plan import Part
from swarmcli.averaging.round.reducer import Reducer
from swarmcli.averaging.shares import reducer_opens
from swarmcli.compression import NoCompression, TensorMessage
from swarmcli.compression.base import all_finite, tensor_memory
from swarmcli.concurrency import beside, forget, forgetful, on_executor, unless_silent
from swarmcli.errors import (
    CallRefused,
    CompressionError,
    ConnectionLost,
    NetworkError,
    ProtocolViolation,
    RoundFailed,
)
from swarmcli.events import GOODBYE
from swarmcli.memory import unwritten
from swarmcli.network import Stream
from swarmcli.network.loop_thread import loop_time

# How exactly the end of sending is seen: with rare looks a quick line would seem slow, see `averaging/seats.py`.
FIRST_LOOK = 0.01  # least seconds between two looks at the bytes that have not left yet …
LATE_BY = 0.1  # … and of the seconds that sending has taken so far
GATE = 1000.0  # times the numbers of others: an aggregator may leave larger ones out of an average


class _ReducerVisit:
    """A reducer that is harder to dial than this member opens its stream here. The stream stays open until the exchange
    is over."""

    def __init__(self) -> None:
        self.stream: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()


class PartSender:
    """Exchanges with all reducers on behalf of one member. Averages land in the memory of its results."""

    def __init__(self, means: CommonMeans, audits: Audits | None, pace: Pace, parts_pace: Pace) -> None:
        """`pace`: of the averages that come in. `parts_pace`: of the parts that come in for this member's own reducer;
        it hears when this member has sent its parts."""
        self.streams: list[Stream] = []
        self._means, self._audits, self._mates, self._faults = means, audits, means.mates, means.faults
        self._pace, self._parts_pace = pace, parts_pace
        me, members = means.mates.me, means.mates.group.members
        self._reducers = [index for index in means.plan.by_reducer if index != me and means.mine is not None]
        self._began, self._whole = loop_time(), set[int]()  # `_whole`: reducers to which all parts have been sent
        self._took = list[float]()  # seconds that sending to each reducer took, or would have taken
        visitors = (index for index in self._reducers if reducer_opens(members[index], members[me]))
        self._visits = {reducer: _ReducerVisit() for reducer in visitors}

    @forgetful
    async def gather(self, own: Reducer) -> list[Average]:
        """Exchanges with all reducers, even if some of them fail, and waits for the averages of this member's `own`.
        Returns the averages of each reducer that gave, and signed, all of its averages."""
        got, mine = list[Average](), self._means.mine
        if not self._reducers:
            self._parts_pace.note_end()
            if mine is not None and mine.weight > 0:
                self._means.tempo.sending[self._mates.me] = 0.0
        async with asyncio.TaskGroup() as tasks:
            for reducer in self._reducers:
                tasks.create_task(self._exchange(reducer, got))
            try:
                for position in range(len(own.parts)):
                    got.append(await own.average(position))
            except RoundFailed as error:
                self._faults.failed[self._mates.me] = error.reason
            self._pace.note_end()
        return got

    async def welcome(self, reducer: int, stream: Stream) -> None:
        """A reducer has opened its stream here; returns when the exchange is over. Raises CallRefused."""
        visit = self._visits.get(reducer)
        if visit is None or visit.stream.done():
            raise CallRefused("unexpected", "this member does not wait for a stream of this reducer")
        self.streams.append(stream)
        visit.stream.set_result(stream)
        await visit.over.wait()  # the end of this handler closes the stream

    def leave(self) -> None:
        """This member takes no further part in streams that reducers open themselves."""
        for visit in self._visits.values():
            visit.over.set()

    # One reducer

    @forgetful
    async def _exchange(self, reducer: int, got: list[Average]) -> None:
        """The whole exchange with one reducer."""
        peer, averages, cause = self._mates.peer(reducer), list[Average](), ""
        try:
            await self._talk_unless_gone(reducer, averages)
        except TimeoutError as error:
            forget(error)
            cause, failed = "it fell silent as a reducer", f"reducer {peer.short} fell silent"
        except LaggedError as error:
            forget(error)
            cause, failed = f"as a reducer {error}", f"reducer {peer.short}: {error}"
        except NetworkError as error:
            forget(error)
            failed = f"reducer {peer.short} {_failure_of(error)}"
            if isinstance(error, CallRefused):
                self._faults.refusing.add(reducer)
        else:
            got += averages
            if reducer in self._mates.group.auxiliaries:
                self._parts_pace.note_end()
            return
        self._faults.failed[reducer] = failed
        if cause:
            self._faults.suspects[reducer] = cause

    @forgetful
    async def _talk_unless_gone(self, reducer: int, averages: list[Average]) -> None:
        """Exchanges with a reducer, and gives it up if it is gone before it has given any average. A reducer without an
        average may be waiting for another member, or have never begun, and its stream does not tell which. Later the
        stream itself ends when the reducer is gone."""
        talk = (self._talk_to_visitor if reducer in self._visits else self._visit)(reducer, averages)
        async with beside(talk) as talking, beside(self._mates.until_gone(reducer, self._means.tempo.begun)) as gone:
            await asyncio.wait([talking, gone], return_when=asyncio.FIRST_COMPLETED)
            if not talking.done() and not averages:
                raise NetworkError(gone.result())
            await talking

    async def _visit(self, reducer: int, averages: list[Average]) -> None:
        mates, patience = self._mates, min(self._means.options.for_reducer, TO_OPEN)
        request, method = OpenExchange(mates.group.group_id, listed=mates.group.listed), mates.method("exchange")
        async with mates.endpoint.stream(mates.peer(reducer), method, request, timeout=patience) as stream:
            self.streams.append(stream)
            await self._talk(reducer, stream, averages)

    async def _talk_to_visitor(self, reducer: int, averages: list[Average]) -> None:
        visit = self._visits[reducer]
        try:
            async with asyncio.timeout(self._means.options.for_reducer):
                stream = await visit.stream
            await self._talk(reducer, stream, averages)
        finally:
            visit.over.set()

    # One stream

    @forgetful
    async def _talk(self, reducer: int, stream: Stream, averages: list[Average]) -> None:
        """Sends this member's parts, and receives all averages of the reducer.

        Raises NetworkError (ProtocolViolation among them) and TimeoutError when the reducer fails.
        """
        mine, results, parts = self._means.mine, self._means.results, self._means.plan.by_reducer[reducer]
        assert mine is not None and results is not None
        expected, before, began = max(1, sum(part.average_bound for part in parts)), stream.arriving, loop_time()

        def come() -> float:
            return (stream.arriving - before) / expected

        try:
            async with beside(self._send(parts, mine, stream)), self._pace.keeping_up(reducer, come):
                await self._receive(reducer, mine, results, stream, averages)
        except LaggedError:  # whoever reduces the whole round brings no parts here: its averages show its line
            sending, seconds = self._means.tempo.sending, (loop_time() - began) / min(1.0, max(come(), 1e-6))
            sending[reducer] = max(seconds, sending.get(reducer, 0.0))
            raise
        finally:
            self._faults.broke |= self._mates.lost_with(reducer, stream)

    @forgetful
    async def _send(self, parts: Sequence[Part], mine: Inputs, stream: Stream) -> None:
        audits, before, sending = self._audits, stream.leaving, self._means.tempo.sending
        began, whole, expected = loop_time(), False, max(1, sum(part.payload_bound for part in parts))
        try:
            terms = mine.weight, mine.note, None if audits is None else audits.commitment, mine.samples
            await stream.send(SenderTerms(self._means.plan.fingerprint, *terms))
            for part in parts if mine.weight > 0 else ():
                message, signature = await on_executor(part.descriptor.nbytes, _encoded, mine, part, audits)
                await stream.send(PartHeader(message.header, signature), message.payload)
            while stream.leaving - before < stream.bytes_sent:  # noqa: ASYNC110  # no event tells that bytes have left
                await asyncio.sleep(max(FIRST_LOOK, LATE_BY * (loop_time() - began)))
            whole = True
        except NetworkError:
            return  # the averages will show whether the reducer is lost: it may only want no more parts
        finally:
            # The median over its streams is this member's time: some reducers may be slow. On a connection that broke
            # nothing left any more, however quick the line is.
            if mine.weight > 0 and not self._mates.lost_with(parts[0].reducer, stream):
                fraction = 1.0 if whole else min(1.0, max((stream.leaving - before) / expected, 1e-6))
                self._took.append((loop_time() - began) / fraction)
                sending[self._mates.me] = statistics.median_low(self._took)
        self._whole.add(parts[0].reducer)
        if len(self._whole) == (1 + len(self._reducers)) // 2:  # half of the streams: this member's line sends well
            self._parts_pace.note_end()

    async def _receive(
        self, reducer: int, mine: Inputs, results: Results, stream: Stream, averages: list[Average]
    ) -> None:
        """Receives all averages of a reducer, and its signature for them."""
        patience, in_time = self._means.options.for_reducer, self._means.in_time
        for part in self._means.plan.by_reducer[reducer]:
            async with unless_silent(stream, patience):
                header, payload = await stream.receive(AverageHeader, _memory_for(part, results))
            check_senders(header.senders, header.weights, self._means.senders)
            if (header.inputs is None) != (self._audits is None):
                raise ProtocolViolation("an average with no hash of its inputs, or one that nobody asked for")
            if (header.tensor is None) != (not header.senders):
                raise ProtocolViolation("an average that does not fit the senders it names")
            quick = reducer in self._whole or loop_time() < self._began + self._means.tempo.soonest
            averages.append(await on_executor(part.descriptor.nbytes, _decode, part, results, header, payload))
            there = self._mates.me in header.senders
            if in_time and there != (mine.weight > 0):
                in_time = quick  # a slow member is left out from some part on
                if there or (quick and not (header.senders and _is_beyond_gate(mine, results, part))):
                    self._faults.untrue.add(reducer)
        async with unless_silent(stream, patience):
            farewell, _ = await stream.receive(Farewell)
        if not self._means.signed.take(reducer, farewell.averages, root_of(averages)):
            raise ProtocolViolation("it has not signed the averages that it gave")
        # The first reason stays: a member that is lost is lost to all reducers, each of which has its own reason.
        told = {member: why for member, why in farewell.left_out.items() if member in self._means.senders}
        self._faults.left_out = told | self._faults.left_out


def _failure_of(error: NetworkError) -> str:
    """What happened, in words that follow a reducer's name. "was lost" means a broken connection, and accuses
    nobody."""
    if isinstance(error, CallRefused):
        return f"refused: {error}"
    if isinstance(error, ProtocolViolation):
        return f"broke the protocol: {error}"
    broke = isinstance(error, ConnectionLost) and not error.reason.endswith(GOODBYE)
    return f"was lost: {error}" if broke else f"gave no averages: {error}"


def check_senders(senders: Sequence[int], weights: Sequence[float], allowed: frozenset[int]) -> None:
    """Raises ProtocolViolation if no average can have these senders and weights."""
    if len(weights) not in (len(senders), 2 * len(senders)):
        raise ProtocolViolation("an average that does not fit the senders it names")
    if list(senders) != sorted(set(senders)) or not allowed.issuperset(senders):
        raise ProtocolViolation("an average of members who have no tensors in this group")
    if not all(MIN_WEIGHT <= weight <= MAX_WEIGHT for weight in weights):
        raise ProtocolViolation("an average with impossible weights")


def _is_beyond_gate(mine: Inputs, results: Results, part: Part) -> bool:
    """Whether a member's values are so much larger than an average that the aggregator may have left them out."""
    return largest(mine.part(part)) > GATE * largest(results.part(part))


def _encoded(mine: Inputs, part: Part, audits: Audits | None) -> tuple[TensorMessage, bytes | None]:
    message = part.codec.compress(mine.part(part))
    return message, None if audits is None else audits.sign(part, mine.weight, message)


def _memory_for(part: Part, results: Results) -> Callable[[AverageHeader, int], memoryview]:
    """The memory for the payload of an average: its place in the results, if it needs no decoding."""

    def into(header: AverageHeader, size: int) -> memoryview:
        if header.tensor is None or size > part.average_bound:
            raise ProtocolViolation(f"the average of part {part.index} has {size} bytes")
        if isinstance(part.average_codec, NoCompression) and size == part.descriptor.nbytes:
            return tensor_memory(results.part(part))
        return unwritten(size)

    return into


def _decode(part: Part, results: Results, header: AverageHeader, payload: memoryview) -> Average:
    """Decodes an average, and computes its digest while the values lie in the processor's cache."""
    if header.tensor is None:
        digest = digest_of(part.index, header.senders, header.weights, None)
        return Average(part, header.senders, header.weights, None, digest, header.inputs or b"")
    message = TensorMessage(header.tensor, (payload,))
    try:
        values = part.average_codec.extract(message, out=results.part(part))
    except CompressionError as error:
        raise ProtocolViolation(f"the average of part {part.index} cannot be decoded: {error}") from error
    if not all_finite(values):
        raise ProtocolViolation(f"the average of part {part.index} holds NaN or infinity")
    content = plain(part.average_codec, message, values)
    digest = digest_of(part.index, header.senders, header.weights, content)
    return Average(part, header.senders, header.weights, None, digest, header.inputs or b"")
