"""The streams of one member under one plan: parts go to their reducers, averages come back, all at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.consensus.mates import Mates
from swarmcli.averaging.round.layout import Plan
from swarmcli.averaging.round.messages import MAX_WORDS, OpenExchange
from swarmcli.averaging.round.reducer import Average, Reducer
from swarmcli.averaging.round.reducing import PartReceiver
from swarmcli.averaging.round.sending import Contribution, FromReducer, PartSender
from swarmcli.averaging.round.vector import Results
from swarmcli.errors import CallRefused, ConnectionLost, NetworkError, RoundFailed
from swarmcli.network import Stream
from swarmcli.tasks import beside, forget, forgetful

_TO_OPEN = 20.0  # seconds for a stream to a reducer that can be dialed: that needs no answer of its round


@dataclass
class Gathered:
    """What has come of an exchange: averages, and which reducers (by index) did not give all of theirs, and why.

    complaint   why averages are missing by nobody's fault
    """

    averages: list[Average] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    complaint: str = ""

    @property
    def reason(self) -> str:
        """In at most as many words as a message takes."""
        return "; ".join(filter(None, dict.fromkeys([self.complaint, *self.failures.values()])))[:MAX_WORDS]

    @property
    def suspects(self) -> tuple[int, ...]:
        return tuple(sorted(self.failures))


class Exchange:
    """One member's part in it. Made and run once: `run` reduces for others, `gather` collects what they reduced."""

    def __init__(
        self,
        mates: Mates,
        plan: Plan,
        senders: Iterable[int],
        mine: Contribution | None,
        results: Results | None,
        options: AllreduceOptions,
    ) -> None:
        """`senders`: the members whose tensors are averaged. `mine`: None unless this is one. `results`: None for an
        auxiliary."""
        self.streams: list[Stream] = []
        self.left_out: dict[int, str] = {}
        self._mates, self._plan, self._options = mates, plan, options
        senders = sorted(senders)
        self.reducer = Reducer(plan, mates.me, senders, mine.inputs if mine else None, results)
        others = [index for index in senders if index != mates.me] if self.reducer.parts else []
        self.receiver = PartReceiver(plan, self.reducer, others, options, mates.endpoint.round_trip)
        self._doubts: dict[int, asyncio.Event] = {}  # of reducers that averages are expected from
        self._sender: PartSender | None = None
        if mine is not None and results is not None:
            self._sender = PartSender(plan, senders, mine, results, options)
            self.reducer.begin(mates.me, mine.weight)
            if mine.note:
                self.left_out[mates.me] = mine.note
        members = mates.group.members
        self._visits = {reducer: _Visit() for reducer in plan.by_reducer if not members[reducer].listening}

    async def run(self) -> None:
        """Reduces this member's parts. Failures of it are told on the streams, and by `gather`."""
        visiting = [] if self._mates.group.members[self._mates.me].listening else self.receiver.members
        async with asyncio.TaskGroup() as tasks:
            for member in visiting:
                tasks.create_task(self._visit(member))
            with suppress(RoundFailed):  # `gather` names this member as the one that failed
                await self.receiver.run()

    @forgetful
    async def gather(self) -> Gathered:
        """Exchanges with all reducers, whatever happens to some of them, and waits for the own averages."""
        got = Gathered()
        reducers = [index for index in self._plan.by_reducer if index != self._mates.me and self._sender is not None]
        async with asyncio.TaskGroup() as tasks:
            for reducer in reducers:
                tasks.create_task(self._exchange(reducer, got))
            try:
                for position in range(len(self.reducer.parts)):
                    got.averages.append(await self.reducer.average(position))
            except RoundFailed as error:
                got.failures[self._mates.me] = error.reason
        return got

    async def take_stream(self, index: int, request: OpenExchange, stream: Stream) -> None:
        """A stream that another member has opened. Raises CallRefused."""
        self.streams.append(stream)
        if not request.by_reducer:
            await self.receiver.serve(index, stream)
            return
        visit = self._visits.get(index)
        if visit is None or visit.stream.done() or self._sender is None:
            raise CallRefused("unexpected", "this member does not wait for a stream of this reducer")
        visit.stream.set_result(stream)
        await visit.over.wait()  # the stream would be closed with the end of its handler

    def absent(self, member: int, reason: str) -> None:
        """Who has not come to this reducer by now need not be waited for; of a reducer that has given nothing it is
        asked whether it is there."""
        self.receiver.absent(member, reason)
        if member in self._doubts:
            self._doubts[member].set()

    async def end(self) -> None:
        """Returns once nothing more is written to the memory of the results. Whoever still waits for averages of this
        member gets none."""
        self.leave()
        await self.reducer.close("this exchange is over")

    def leave(self) -> None:
        """This member takes no further part in what reducers do that open their streams themselves."""
        for visit in self._visits.values():
            visit.over.set()

    @property
    def bytes_sent(self) -> int:
        return sum(stream.bytes_sent for stream in self.streams)

    @property
    def bytes_received(self) -> int:
        return sum(stream.bytes_received for stream in self.streams)

    @property
    def all_left_out(self) -> dict[int, str]:
        """Member index → why its tensors are missing somewhere, as this member's reducer and the others told it."""
        return self.receiver.left_out | self.left_out

    @forgetful
    async def _exchange(self, reducer: int, got: Gathered) -> None:
        """Everything between this member as a sender and one reducer; what came before a failure counts."""
        peer, here = self._mates.peer(reducer), FromReducer()
        try:
            await self._talk_unless_absent(reducer, here)
        except TimeoutError as error:
            forget(error)
            got.failures[reducer] = f"reducer {peer.short} fell silent"
        except NetworkError as error:
            forget(error)
            got.failures[reducer] = f"reducer {peer.short} was lost: {error}"
        got.averages += here.averages
        # The first reducer's word stands: a member that is lost is lost to all of them, each with a reason of its own.
        for member, reason in here.left_out.items():
            self.left_out.setdefault(member, reason)

    @forgetful
    async def _talk_unless_absent(self, reducer: int, here: FromReducer) -> None:
        talk = self._exchange_with_visitor if reducer in self._visits else self._exchange_by_visit
        doubts = self._doubts[reducer] = asyncio.Event()
        async with beside(talk(reducer, here)) as talking:
            while not talking.done():
                async with beside(doubts.wait()) as doubting:
                    await asyncio.wait([talking, doubting], return_when=asyncio.FIRST_COMPLETED)
                # A reducer that has given an average lives, or did: its stream ends by itself when it is gone. One that
                # has given none may wait for somebody else, or have never begun, and a stream does not tell which.
                if talking.done() or here.averages:
                    await talking
                doubts.clear()  # before it is asked: what is said meanwhile is asked about again
                if not talking.done() and not await self._is_there(reducer):
                    raise ConnectionLost("it is out of reach, and so it is for others")

    async def _is_there(self, reducer: int) -> bool:
        answer = await self._mates.presence(reducer)
        return answer is not None and answer.standing in ("running", "expected")

    async def _exchange_by_visit(self, reducer: int, got: FromReducer) -> None:
        assert self._sender is not None
        mates, patience = self._mates, min(self._options.for_reducer, _TO_OPEN)
        request = OpenExchange(mates.group.group_id)
        method = mates.post.method("exchange")
        async with mates.endpoint.stream(mates.peer(reducer), method, request, timeout=patience) as stream:
            self.streams.append(stream)
            await self._sender.exchange(reducer, stream, got)

    async def _exchange_with_visitor(self, reducer: int, got: FromReducer) -> None:
        assert self._sender is not None
        visit = self._visits[reducer]
        try:
            async with asyncio.timeout(self._options.for_reducer):
                stream = await visit.stream
            await self._sender.exchange(reducer, stream, got)
        finally:
            visit.over.set()

    async def _visit(self, member: int) -> None:
        """Opens the stream to a member that cannot dial this reducer."""
        mates, patience = self._mates, self._options.for_reducer
        request = OpenExchange(mates.group.group_id, by_reducer=True)
        method = mates.post.method("exchange")
        try:
            async with mates.endpoint.stream(mates.peer(member), method, request, timeout=patience) as stream:
                self.streams.append(stream)
                await self.receiver.serve(member, stream)
                await self.receiver.finish(stream)
        except (NetworkError, TimeoutError) as error:
            self.receiver.absent(member, f"the reducer could not reach it: {error}")


class _Visit:
    """A reducer that cannot be dialed is to open its stream here; it stays open until the exchange is over."""

    def __init__(self) -> None:
        self.stream: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()
