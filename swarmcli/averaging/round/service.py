"""The rounds of one averager on the network: its methods, arrivals before their round, late questions."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias
from weakref import WeakValueDictionary

import torch

from swarmcli.averaging.config import Trust
from swarmcli.averaging.consensus import messages as consensus
from swarmcli.averaging.consensus.acceptor import RoundVotes
from swarmcli.averaging.consensus.ballots import ZERO
from swarmcli.averaging.consensus.certificate import DoubleVote
from swarmcli.averaging.consensus.comparing import compare, confirm
from swarmcli.averaging.consensus.leader import Agreement
from swarmcli.averaging.consensus.presence import GroupCalls
from swarmcli.averaging.group import Group
from swarmcli.averaging.round.auditing import Audits
from swarmcli.averaging.round.buffers import Average, Holdings
from swarmcli.averaging.round.copying import give_copies
from swarmcli.averaging.round.messages import Accusation, CopyRequest, DrawnPart, InputList, OpenExchange
from swarmcli.averaging.round.plan import Plan
from swarmcli.averaging.seats import Seats
from swarmcli.averaging.trust import PeerTrust, TwoGroups
from swarmcli.errors import CallRefused, NetworkError, RoundFailed, RoundUndecided
from swarmcli.memory import ReusableBuffer
from swarmcli.network import Endpoint, PeerID, Stream
from swarmcli.recent import Recent
from swarmcli.tasks import Bell, forgetful

MOST_TRIES = 4  # at one round, after which it is given up

logger = logging.getLogger(__name__)

# The committed result of a round, from peers that keep it on disk: averages and parts; None: no peer gives it.
FetchCommitted: TypeAlias = Callable[
    [Group, Plan, bytes], Awaitable[tuple[list[torch.Tensor], tuple[Average, ...]] | None]
]


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """How long rounds are remembered, and how long others wait. Times in seconds."""

    early: float = 120.0  # that an arrival waits for its round to begin here: this member may still be computing
    audited: int = 16  # tries whose accusations this member hears
    remembered: int = 256  # rounds whose votes and outcomes are kept, for late questions …
    remembered_members: int = 1 << 16  # … if they have no more members together: a member takes about 1 KiB
    declining: float = 60.0  # that the leader may take to begin its own part and hear that a member takes none
    last: int = 5  # committed tries, by which the next one is planned
    kept: float = 20.0  # that this member gives away committed averages; their file serves longer


class Round(Protocol):
    """A round that runs here, as the service needs it."""

    group: Group
    trust: Trust
    holdings: Holdings
    agreement: Agreement
    audits: Audits | None

    async def take_stream(self, member: int, request: OpenExchange, stream: Stream) -> None: ...
    def drop_false(self) -> None: ...
    def holds(self, digest: bytes) -> bool: ...
    async def obtain(self, digest: bytes) -> None: ...


def tries(group: Group) -> list[Group]:
    """The groups of all tries at a round; the first is the round's own."""
    return [group, *(group.derived(f"try {number}") for number in range(1, MOST_TRIES))]


class AllreduceService:
    """Serves the rounds of one averager. All peers that average with each other use the same prefix."""

    def __init__(
        self,
        endpoint: Endpoint,
        prefix: str,
        fetch_committed: FetchCommitted | None = None,
        peer_trust: PeerTrust | None = None,
        trust: Trust = "strangers",
        options: ServiceOptions = ServiceOptions(),
    ) -> None:
        """`fetch_committed` gives a late member the result that its group committed. `peer_trust`: of the run;
        None: of these rounds alone. `trust`: as in AllreduceOptions."""
        self.endpoint = endpoint
        self.peer_trust = PeerTrust(endpoint, prefix) if peer_trust is None else peer_trust
        self._trust, self._options = trust, options
        self.fetch_committed = fetch_committed
        self.memory = ReusableBuffer()
        self.prefix = prefix
        # The last tries that committed: seconds of the slowest sender, and bytes
        self.took: deque[tuple[float, int]] = deque(maxlen=options.last)
        self.committed = -math.inf  # loop time of the last one
        self.seats = Seats()  # of the round under way, or the last one
        self.quickly = math.inf  # seconds for it once all members have begun; see RoundTime
        self._served: list[str] = []  # full names of methods
        self._rounds: dict[bytes, Round] = {}
        self._audits: Recent[bytes, Audits] = Recent(options.audited)  # of the last tries: accusations may come late
        self._expected: dict[bytes, Group] = {}
        self._votes: OrderedDict[bytes, RoundVotes] = OrderedDict()  # of rounds that are or were here
        self._kept: dict[bytes, Holdings] = {}  # of the round that was committed last, by step
        self._forget: asyncio.TimerHandle | None = None
        self._beginning: WeakValueDictionary[bytes, Bell] = WeakValueDictionary()  # by group, while calls wait for it
        self._closed = False

    def start(self) -> None:
        """Begins to answer. Raises ValueError if another service of this endpoint has the same prefix."""
        streams: dict[str, tuple[type[Any], Callable[..., Awaitable[None]]]] = {
            "exchange": (OpenExchange, self._exchange),
            "copy": (CopyRequest, self._copy),
            "input": (DrawnPart, self._input),
            "accuse": (Accusation, self._accusation),
        }
        calls: dict[str, tuple[type[Any], Callable[..., Awaitable[Any]]]] = {
            "vote": (consensus.VoteMessage, self._vote),
            "outcome": (consensus.OutcomeQuestion, self._outcome),
            "absence": (consensus.AbsenceNotice, self._absence),
            "presence": (consensus.PresenceQuestion, self._presence),
            "prepare": (consensus.Prepare, self._prepare),
            "propose": (consensus.Propose, self._propose),
            "confirm": (consensus.Confirm, self._confirm),
            "compare": (consensus.Compare, self._compare),
            "inputs": (DrawnPart, self._inputs),
            "holdings": (consensus.HoldingsQuestion, self._holdings),
        }
        self._unsubscribe = self.peer_trust.subscribe(self._on_ban)
        for name, (message, handler) in streams.items():
            self.endpoint.serve_stream(self.method(name), message, handler)
        for name, (message, handler) in calls.items():
            self.endpoint.serve(self.method(name), message, handler)
        self._served = [self.method(name) for name in (*streams, *calls)]

    def close(self) -> None:
        """Answers nobody any more; calls that wait for a round that has not begun are refused. Idempotent."""
        if not self._closed:
            self._closed = True
            self._unsubscribe()
            self.endpoint.withdraw(*self._served)
            self.release()
            if self._forget is not None:
                self._forget.cancel()
            self.memory.forget()
            self._tell_begun(list(self._beginning))

    def method(self, name: str) -> str:
        """The full name of a method on the wire."""
        return f"allreduce.{name}.{self.prefix}"

    # Rounds that come and go

    @contextmanager
    def expecting(self, *groups: Group) -> Iterator[None]:
        """While the block runs, others hear that this member will take part, however long it computes."""
        self._expected.update((group.group_id, group) for group in groups)
        try:
            yield
        finally:
            for group in groups:
                self._expected.pop(group.group_id, None)  # a leader may have sent the group of another search again

    @contextmanager
    def hosting(self, round_: Round) -> Iterator[RoundVotes]:
        """While the block runs, the round gets the messages for it. Raises RoundFailed if it has been here before: then
        its leader has sent an old group again, and no member may vote twice."""
        group_id = round_.group.group_id
        if group_id in self._votes and self._votes[group_id].begun:
            raise RoundFailed("its group has had a round before", [round_.group.leader])
        if self.has_split(round_.group):
            raise RoundUndecided("its leader has begun another group at the same time")  # others may decide it
        votes = self._votes_for(round_.group, round_.trust)
        votes.begun = True
        self._rounds[group_id] = round_
        if round_.audits is not None:
            self._audits[group_id] = round_.audits
        self._tell_begun([group_id])
        try:
            yield votes
        finally:
            del self._rounds[group_id]
            votes.over = True

    def has_split(self, group: Group) -> bool:
        """Whether its leader is known to have begun another one in the same search."""
        proof = self.peer_trust.proof(group.leader)
        return isinstance(proof, TwoGroups) and proof.search == group.members[0].search

    def leave(self, *groups: Group) -> None:
        """This member will not take part in rounds in which others expect it. It still promises, so that they need not
        wait for its silence."""
        for group in groups:
            votes = self._votes_for(group, self._trust)
            votes.begun = votes.over = True
        self._tell_begun([group.group_id for group in groups])

    async def decline(self, group: Group) -> None:
        """This member takes no part in a round of which the others know, so that they go on without it."""
        if self.endpoint.peer_id not in group:
            return  # its leader has made it up
        self.leave(*tries(group))
        if group.leader == self.endpoint.peer_id:
            return  # members that ask for the outcome hear that this one does not know, and follow the next in rank
        vote = consensus.VoteMessage(group.group_id, None, "it left before the round began")
        try:
            method, timeout = self.method("vote"), self._options.declining
            await self.endpoint.call(group.leader, method, vote, consensus.Noted, timeout=timeout)
        except NetworkError as error:
            logger.debug("the leader did not hear that this peer has left: %s", error)

    def keep(self, group_id: bytes, holdings: Holdings) -> None:
        """Keeps committed averages for members that lack some; until the next round, and not for long."""
        self._kept[group_id] = holdings
        if self._forget is not None:
            self._forget.cancel()
        self._forget = asyncio.get_running_loop().call_later(self._options.kept, self.release)

    def release(self) -> None:
        """Lets go of the kept averages."""
        self._kept.clear()
        if self._forget is not None:
            self._forget.cancel()
            self._forget = None

    # Handlers

    @forgetful
    async def _exchange(self, peer: PeerID, request: OpenExchange, stream: Stream) -> None:
        self.peer_trust.check(peer)
        self._compare_lists(request)
        round_, member = await self._running(peer, request.group_id)
        await round_.take_stream(member, request, stream)

    @forgetful
    async def _copy(self, peer: PeerID, request: CopyRequest, stream: Stream) -> None:
        self.peer_trust.check(peer)
        holdings = await self._held_for(peer, request.group_id)
        if holdings is None:
            raise CallRefused("over", "the averages of this round are not here any more")
        await give_copies(holdings, request, stream)

    async def _inputs(self, peer: PeerID, request: DrawnPart) -> InputList:
        audits, member = await self._audited(peer, request.group_id)
        return audits.list_inputs(member, request)

    @forgetful
    async def _input(self, peer: PeerID, request: DrawnPart, stream: Stream) -> None:
        audits, member = await self._audited(peer, request.group_id)
        await audits.give(member, request, stream)

    @forgetful
    async def _accusation(self, peer: PeerID, header: Accusation, stream: Stream) -> None:
        self.peer_trust.check(peer)
        audits, member = await self._audited(peer, header.group_id)
        await audits.hear(member, header, stream)
        if header.group_id in self._rounds:
            self._rounds[header.group_id].drop_false()

    async def _vote(self, peer: PeerID, message: consensus.VoteMessage) -> consensus.Noted:
        await self._take_vote(peer, message)
        return consensus.Noted()

    async def _take_vote(self, peer: PeerID, message: consensus.VoteMessage) -> None:
        """Takes a vote once the round has begun here. Raises CallRefused if it does not, or is over."""
        round_, member = await self._running(peer, message.group_id)
        round_.agreement.hear(member, message)

    async def _absence(self, peer: PeerID, notice: consensus.AbsenceNotice) -> consensus.Noted:
        round_, teller = await self._running(peer, notice.group_id)
        round_.agreement.hear_absence(teller, notice)
        return consensus.Noted()

    async def _outcome(self, peer: PeerID, question: consensus.OutcomeQuestion) -> consensus.OutcomeAnswer:
        votes = await self._begun(question.group_id)
        member, round_ = votes.member(peer), self._rounds.get(question.group_id)
        if votes.decided is None and round_ is not None:
            await round_.agreement.tell_outcome(member)
        return consensus.OutcomeAnswer(votes.decided, votes.twice)

    async def _presence(self, peer: PeerID, question: consensus.PresenceQuestion) -> consensus.PresenceAnswer:
        votes, group_id = self._votes.get(question.group_id), question.group_id
        if votes is None or not votes.begun:
            group = self._expected.get(group_id)
            return consensus.PresenceAnswer("expected" if group is not None and peer in group else "unknown")
        votes.member(peer)
        standing: consensus.Standing = "over" if votes.over else "running"
        round_ = self._rounds.get(group_id)
        return consensus.PresenceAnswer(standing, votes.decided, idle=round_ is None or round_.agreement.idle)

    async def _prepare(self, peer: PeerID, message: consensus.Prepare) -> consensus.PrepareAnswer:
        votes = await self._begun(message.group_id)
        votes.check_proposer(peer, message.ballot)
        round_ = self._rounds.get(message.group_id)
        if round_ is not None and votes.decided is None:
            return await round_.agreement.prepare(votes.member(peer), message.ballot)
        return votes.prepare(message.ballot)

    async def _propose(self, peer: PeerID, message: consensus.Propose) -> consensus.ProposeAnswer:
        votes = await self._begun(message.group_id)
        votes.check_proposer(peer, message.ballot)
        round_, value = self._rounds.get(message.group_id), message.value
        if round_ is not None:
            round_.agreement.note_sign(votes.member(peer))
            if not votes.electorate.decides(message.promises):
                await round_.agreement.meeting()
        if (
            round_ is not None
            and isinstance(value, consensus.Committed)
            and message.ballot == votes.acceptor.promised > ZERO
        ):
            await round_.obtain(value.digest)
        held = round_ is not None and isinstance(value, consensus.Committed) and round_.holds(value.digest)
        return votes.accept(message, held)

    async def _confirm(self, peer: PeerID, message: consensus.Confirm) -> consensus.ConfirmAnswer:
        votes = await self._begun(message.group_id)
        votes.check_proposer(peer, message.prepared.votes.ballot)
        round_ = self._rounds.get(message.group_id)
        if round_ is not None:
            round_.agreement.note_sign(votes.member(peer))
            if not votes.electorate.is_prepared(message.prepared):
                await round_.agreement.meeting()
        answer = await confirm(GroupCalls(self.endpoint, self.method, votes.group), votes, message.prepared)
        self._settle(message.group_id, votes)
        return answer

    async def _compare(self, peer: PeerID, message: consensus.Compare) -> consensus.CompareAnswer:
        """Answers at once, also if this member is only expected: it must know of the certificate when it begins."""
        votes, group = self._votes.get(message.group_id), self._expected.get(message.group_id)
        if votes is None and group is not None and peer in group:
            votes = self._votes_for(group, self._trust)
        if votes is None:
            raise CallRefused("unknown", "this round has not begun here")
        votes.member(peer)
        answer = compare(votes, message.prepared)
        self._settle(message.group_id, votes)
        return answer

    def _settle(self, group_id: bytes, votes: RoundVotes) -> None:
        """Ends the round here if a decision is known, or too many members voted twice."""
        round_ = self._rounds.get(group_id)
        if round_ is not None and (votes.decided is not None or votes.void):
            round_.agreement.stop()

    async def _holdings(self, peer: PeerID, question: consensus.HoldingsQuestion) -> consensus.HoldingsAnswer:
        holdings = await self._held_for(peer, question.group_id)
        same = holdings is not None and holdings.plan.fingerprint == question.plan
        if holdings is None or not same:
            return consensus.HoldingsAnswer()
        return consensus.HoldingsAnswer(holdings.digests, {} if holdings.signed is None else holdings.signed.told)

    def _compare_lists(self, request: OpenExchange) -> None:
        """If the leader has begun another round with the same members, no quorum can decide: this member takes no
        further part, and raises CallRefused."""
        known = {*self._expected, *self._votes}
        for group in self._expected.values():
            if request.group_id not in known and group.has_listed(request.group_id, request.listed):
                ids, signatures = (group.group_id, request.group_id), (group.listed, request.listed)
                self.peer_trust.prove(TwoGroups(group.leader, group.members[0].search, ids, signatures))
                for round_ in self._rounds.values():  # its leader may have been banned for something else before
                    if round_.group.leader == group.leader:
                        round_.agreement.stop()
                raise CallRefused("unknown", "the leader has begun another group at the same time")

    def _on_ban(self, culprit: PeerID) -> None:
        """If the leader has begun two groups, no quorum can decide: this member does not wait for a decision."""
        for round_ in self._rounds.values():
            if round_.group.leader == culprit and self.has_split(round_.group):
                round_.agreement.stop()

    # Finding the round

    async def _audited(self, peer: PeerID, group_id: bytes) -> tuple[Audits, int]:
        """The audits of a try, which may be over here, and the index of the peer. Raises CallRefused."""
        member = (await self._begun(group_id)).member(peer)
        if group_id not in self._audits:
            raise CallRefused("over", "this try is not audited here, or long over")
        return self._audits[group_id], member

    async def _running(self, peer: PeerID, group_id: bytes) -> tuple[Round, int]:
        """The round that runs here, and the index of the peer. Raises CallRefused."""
        votes = await self._begun(group_id)
        member = votes.member(peer)
        if group_id not in self._rounds:
            raise CallRefused("over", "this round is over here")
        return self._rounds[group_id], member

    async def _held_for(self, peer: PeerID, group_id: bytes) -> Holdings | None:
        (await self._begun(group_id)).member(peer)
        if group_id in self._rounds:
            return self._rounds[group_id].holdings
        return self._kept.get(group_id)

    async def _begun(self, group_id: bytes) -> RoundVotes:
        """This member's votes in a round; waits for the round to begin. Raises CallRefused if it does not."""
        try:
            async with asyncio.timeout(self._options.early):
                while group_id not in self._votes or not self._votes[group_id].begun:
                    if self._closed:
                        raise CallRefused("over", "this averager is closed")
                    await self._beginning.setdefault(group_id, Bell()).wait()
        except TimeoutError:
            raise CallRefused("unknown", "this round has not begun here") from None
        return self._votes[group_id]

    def _tell_begun(self, group_ids: Iterable[bytes]) -> None:
        """Wakes the calls that wait for these groups to begin here, and no others: strangers may make many wait."""
        for group_id in group_ids:
            if (bell := self._beginning.get(group_id)) is not None:
                bell.ring()

    def _accuse(self, proof: DoubleVote) -> None:
        """A member has voted twice: this one bans it."""
        self.peer_trust.prove(proof)
        if proof.group_id in self._votes:
            self._settle(proof.group_id, self._votes[proof.group_id])

    def _votes_for(self, group: Group, trust: Trust) -> RoundVotes:
        """This member's votes in a round. It forgets the oldest round that is over when there are too many, and never
        answers for it again."""
        votes = self._votes.get(group.group_id)
        if votes is None:
            votes = RoundVotes(group, self.endpoint.identity, trust, self._accuse, self.endpoint.prefix)
            self._votes[group.group_id] = votes
        for group_id in [each for each in self._votes if each not in self._rounds and each != group.group_id]:
            members = sum(len(each.group) for each in self._votes.values())
            if len(self._votes) <= self._options.remembered and members <= self._options.remembered_members:
                break
            del self._votes[group_id]
        return votes
