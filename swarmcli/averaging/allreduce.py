"""One round of averaging at one member: a butterfly all-reduce with one outcome for the whole group.

    own parts ─────────────────▶ own reducer ───▶ averages ──▶ everyone
    parts of others' shares ───▶ their reducers ─▶ averages ──▶ here        all at the same time, part by part
    everything is here ──▶ vote with its digest ──▶ the leader's decision ──▶ results are handed out, or not

Sending, adding and receiving overlap. Inputs are only read; results lie in memory of their own until the group has
decided, so a round that fails changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import torch

from swarmcli.averaging.agreement import Agreement, Follower, Leader
from swarmcli.averaging.group import Group
from swarmcli.averaging.layout import Layout, Plan
from swarmcli.averaging.messages import OpenExchange
from swarmcli.averaging.outcome import Accept, Committed, Decision, Reject, Vote, conclude
from swarmcli.averaging.patience import AllreduceOptions
from swarmcli.averaging.reducer import MAX_WEIGHT, MIN_WEIGHT, Average, Reducer
from swarmcli.averaging.reducing import PartReceiver
from swarmcli.averaging.results import AllreduceResult, contributions, result_digest
from swarmcli.averaging.sending import Contribution, FromReducer, PartSender
from swarmcli.averaging.service import AllreduceService
from swarmcli.averaging.tasks import beside, forgetful, on_executor
from swarmcli.averaging.vector import Inputs, Results
from swarmcli.errors import CallRefused, NetworkError, RoundFailed
from swarmcli.events import PeerRefused
from swarmcli.network import PeerID, PeerInfo, Stream


class Allreduce:
    """One round of one group at one member. Made and run once."""

    def __init__(
        self,
        service: AllreduceService,
        group: Group,
        tensors: Sequence[torch.Tensor],
        *,
        weight: float,
        options: AllreduceOptions | None = None,
    ) -> None:
        """`tensors` must not change until `run` has returned. `weight` is of this member's tensors in the mean; with
        zero it takes part and adds nothing. An auxiliary's tensors only tell shapes and types, and it has no weight.

        Raises ValueError for a weight that is neither zero nor one that reducers accept, and for tensors that have
        no mean; KeyError if this peer is not in the group.
        """
        if weight != 0 and not MIN_WEIGHT <= weight <= MAX_WEIGHT:
            raise ValueError(f"weight must be 0, or {MIN_WEIGHT} to {MAX_WEIGHT}, got {weight}")
        self.group_id = group.group_id
        self._service, self._group, self._endpoint = service, group, service.endpoint
        self._options = options if options is not None else AllreduceOptions()
        self._me = group.index_of(self._endpoint.peer_id)
        self._tensors, self._weight = tensors, weight
        layout = Layout.of(tensors, self._options.compression, self._options.tensor_infos)
        self._plan = Plan.make(layout, group.part_shares, self._options.part_size_bytes)
        self._senders = [index for index, member in enumerate(group.members) if not member.auxiliary]
        self._streams: list[Stream] = []
        self._visits = {reducer: _Visit() for reducer in self._plan.by_reducer if not group.members[reducer].listening}
        self._left_out: dict[int, str] = {}
        self._agreement = self._make_agreement()
        self._results: Results  # not of an auxiliary, like the next
        self._sender: PartSender
        self._reducer: Reducer
        self._receiver: PartReceiver

    @property
    def _auxiliary(self) -> bool:
        return self._group.members[self._me].auxiliary

    async def run(self) -> AllreduceResult:
        """Takes part until the round's outcome is known.

        Raises RoundFailed when the group gave it up: nothing changed anywhere. Raises RoundUndecided when this
        member could not follow the group: its tensors are untouched, others may hold averages.
        """
        await self._prepare()
        decision: Decision | None = None
        averages: list[Average] | None = None
        try:
            with self._service.hosting(self):
                decision, averages = await self._decide()
            return self._conclude(decision, averages)
        finally:
            self._agreement.stop("this member has left the round")
            for visit in self._visits.values():
                visit.over.set()
            for index, reason in self._receiver.refused.items():
                self._endpoint.events.emit(PeerRefused(self._peer(index).text, reason, "tensors"))
            self._let_go(isinstance(decision, Committed), averages is not None)

    def _let_go(self, committed: bool, complete: bool) -> None:
        """Errors hold on to the frames that they came through, and so to this object: not to its memory too.

        After a commit, whoever is still being served with averages keeps what that takes.
        """
        if not committed:
            self._reducer.abort("the round was given up")
        if not (committed and complete) and not self._auxiliary:
            self._results.release()
        del self._reducer, self._receiver, self._tensors

    # What the service hands over

    async def take_stream(self, peer: PeerID, request: OpenExchange, stream: Stream) -> None:
        index = self._member(peer)
        self._streams.append(stream)
        if not request.by_reducer:
            await self._receiver.serve(index, stream)
            return
        visit = self._visits.get(index)
        if visit is None or visit.stream.done() or self._auxiliary:
            raise CallRefused("unexpected", "this member does not wait for a stream of this reducer")
        visit.stream.set_result(stream)
        await visit.over.wait()

    def take_vote(self, peer: PeerID, vote: Vote) -> None:
        index = self._member(peer)
        if not isinstance(self._agreement, Leader):
            raise CallRefused("not leading", "votes go to the leader")
        if isinstance(vote, Accept) and vote.digest is None and not self._group.members[index].auxiliary:
            raise CallRefused("vote", "only auxiliaries accept a result without knowing it")
        self._agreement.hear(index, vote)

    def take_absence(self, peer: PeerID, member: int, reason: str) -> None:
        if peer != self._group.leader:
            raise CallRefused("not leading", "only the leader says who is absent")
        self._receiver.absent(member, reason)

    async def tell_outcome(self, peer: PeerID) -> Decision | None:
        return await self._agreement.word(self._member(peer))

    # The round

    async def _prepare(self) -> None:
        mine, results, layout = None, None, self._plan.layout
        if not self._auxiliary:
            mine = await on_executor(layout.nbytes, _contribution, self._tensors, self._weight)
            results = self._results = Results(layout, self._service.memory.take(layout.nbytes))
            self._sender = PartSender(self._plan, self._senders, mine, results, self._options)
        self._reducer = Reducer(self._plan, self._me, self._senders, mine.inputs if mine else None, results)
        others = [index for index in self._senders if index != self._me] if self._reducer.parts else []
        self._receiver = PartReceiver(self._plan, self._reducer, others, self._options, self._endpoint.round_trip)
        if mine is not None:
            self._reducer.begin(self._me, mine.weight)
        if mine is not None and mine.note:
            self._left_out[self._me] = mine.note
        for member in self._group.members:
            if member.addresses:
                self._endpoint.learn(PeerInfo(member.peer_id, member.addresses))

    @forgetful
    async def _decide(self) -> tuple[Decision | None, list[Average] | None]:
        """The decision, and what this member holds of the result if that is all of it."""
        async with (
            beside(self._agreement.run()) as agreeing,
            beside(self._reduce()) as reducing,
            beside(self._take_part()) as taking_part,
        ):
            decision = await agreeing
            if not isinstance(decision, Committed):
                return decision, None
            averages = await taking_part
            await reducing
            return decision, averages

    async def _take_part(self) -> list[Average] | None:
        """Exchanges everything and votes. Returns the averages, or None if they are not all here."""
        averages: list[Average] | None = None
        vote: Vote
        try:
            async with asyncio.timeout(self._options.allreduce_timeout):
                averages = await self._gather()
                vote = Accept(None if self._auxiliary else result_digest(averages))
        except RoundFailed as error:
            vote = Reject(error.reason, tuple(self._member(PeerID(peer)) for peer in error.suspects))
        except TimeoutError:
            vote = Reject(f"not done within {self._options.allreduce_timeout} s")
        await self._agreement.cast(vote)
        return averages

    @forgetful
    async def _gather(self) -> list[Average]:
        """The averages of all parts (of an auxiliary: of its own), checked. Raises RoundFailed."""
        reducers = [] if self._auxiliary else [index for index in self._plan.by_reducer if index != self._me]
        try:
            async with asyncio.TaskGroup() as tasks:
                exchanges = [tasks.create_task(self._exchange(reducer)) for reducer in reducers]
                averages = [await self._reducer.average(position) for position in range(len(self._reducer.parts))]
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        for exchange in exchanges:
            averages += exchange.result()
        averages.sort(key=lambda average: average.part.index)
        empty = [average.part.index for average in averages if not average.senders]
        if empty and len(empty) < len(averages):
            raise RoundFailed(f"nobody's tensors arrived for part {empty[0]}")
        return averages

    @forgetful
    async def _exchange(self, reducer: int) -> list[Average]:
        """Everything between this member as a sender and one reducer. Raises RoundFailed naming the reducer."""
        peer = self._peer(reducer)
        try:
            if reducer in self._visits:
                got = await self._exchange_with_visitor(reducer)
            else:
                request = OpenExchange(self.group_id)
                method = self._service.method("exchange")
                async with self._endpoint.stream(peer, method, request, timeout=self._options.for_reducer) as stream:
                    self._streams.append(stream)
                    got = await self._sender.exchange(reducer, stream)
        except TimeoutError:
            raise RoundFailed(f"reducer {peer.short} fell silent", (peer,)) from None
        except NetworkError as error:
            raise RoundFailed(f"reducer {peer.short} was lost: {error}", (peer,)) from error
        for member, reason in got.left_out.items():
            self._left_out.setdefault(member, reason)
        return got.averages

    async def _exchange_with_visitor(self, reducer: int) -> FromReducer:
        visit = self._visits[reducer]
        try:
            async with asyncio.timeout(self._options.for_reducer):
                stream = await visit.stream
            return await self._sender.exchange(reducer, stream)
        finally:
            visit.over.set()

    async def _reduce(self) -> None:
        """Reduces this member's parts. Failures of it are told on the streams, and by this member's vote."""
        visiting = [] if self._group.members[self._me].listening else self._receiver.members
        async with asyncio.TaskGroup() as tasks:
            for member in visiting:
                tasks.create_task(self._visit(member))
            with suppress(RoundFailed):
                await self._receiver.run()

    async def _visit(self, member: int) -> None:
        """Opens the stream to a member that cannot dial this reducer."""
        request = OpenExchange(self.group_id, by_reducer=True)
        method, patience = self._service.method("exchange"), self._options.for_reducer
        try:
            async with self._endpoint.stream(self._peer(member), method, request, timeout=patience) as stream:
                self._streams.append(stream)
                await self._receiver.serve(member, stream)
                await self._receiver.finish(stream)
        except (NetworkError, TimeoutError) as error:
            self._receiver.absent(member, f"the reducer could not reach it: {error}")

    # Small things

    def _make_agreement(self) -> Agreement:
        if self._me == 0:
            return Leader(self._service, self._group, self._plan.by_reducer, self._options, self._absent)
        return Follower(self._service, self._group, self._me, self._options)

    def _conclude(self, decision: Decision | None, averages: list[Average] | None) -> AllreduceResult:
        digest = None if averages is None or self._auxiliary else result_digest(averages)
        if self._auxiliary and isinstance(decision, Committed):
            digest = decision.digest  # it holds no result that could differ
        conclude(digest, decision, [member.peer_id for member in self._group.members])
        weights, partly = contributions(self._group, averages or [])
        left_out = {self._peer(index): reason for index, reason in (self._receiver.left_out | self._left_out).items()}
        return AllreduceResult(
            averages=self._results.tensors() if weights and not self._auxiliary else [],
            contributors=tuple(weights),
            weights=weights,
            left_out=partly | left_out,
            digest=digest or b"",
            bytes_sent=sum(stream.bytes_sent for stream in self._streams),
            bytes_received=sum(stream.bytes_received for stream in self._streams),
            parts=tuple(averages or ()),
        )

    def _absent(self, member: int, reason: str) -> None:
        self._receiver.absent(member, reason)

    def _peer(self, index: int) -> PeerID:
        return self._group.members[index].peer_id

    def _member(self, peer: PeerID) -> int:
        if peer not in self._group:
            raise CallRefused("stranger", "only members of the group take part in its round")
        return self._group.index_of(peer)


class _Visit:
    """A reducer that cannot be dialed is to open its stream here; it stays open until the exchange is over."""

    def __init__(self) -> None:
        self.stream: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()


def _contribution(tensors: Sequence[torch.Tensor], weight: float) -> Contribution:
    """What this member brings; tensors that cannot be averaged are kept out of everyone's average from the start."""
    inputs = Inputs(tensors)
    if weight > 0 and not inputs.all_finite():
        return Contribution(inputs, 0.0, "its tensors hold NaN or infinity")
    return Contribution(inputs, weight)
