"""Where the rounds of one averager meet the network: its methods, arrivals before their round, late questions."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeAlias
from weakref import WeakValueDictionary

import torch

from swarmcli.averaging.bans import Bans, TwoGroups
from swarmcli.averaging.config import Trust
from swarmcli.averaging.consensus import messages as consensus
from swarmcli.averaging.consensus.acceptor import RoundVotes
from swarmcli.averaging.consensus.ballots import ZERO
from swarmcli.averaging.consensus.certificate import DoubleVote
from swarmcli.averaging.consensus.comparing import compare, confirm
from swarmcli.averaging.consensus.leader import Agreement
from swarmcli.averaging.consensus.presence import Mates
from swarmcli.averaging.group import Group
from swarmcli.averaging.round.auditing import Audits
from swarmcli.averaging.round.buffers import Average, Holdings
from swarmcli.averaging.round.copying import give_copies
from swarmcli.averaging.round.messages import AccusationHeader, CopyRequest, InputsRequest, OpenExchange
from swarmcli.averaging.round.plan import Plan
from swarmcli.errors import CallRefused, NetworkError, RoundFailed, RoundUndecided
from swarmcli.memory import ReusableBuffer
from swarmcli.network import Endpoint, PeerID, Stream
from swarmcli.recent import Recent
from swarmcli.tasks import Bell, forgetful

_CALLS = ("vote", "outcome", "absence", "presence", "prepare", "propose", "confirm", "compare", "holdings")
_STREAMS = ("exchange", "copy", "inputs", "accuse")
MOST_TRIES = 4  # at one round, after which it is given up
_EARLY = 120.0  # seconds that an arrival waits for its round to begin here: this member may still be computing
_AUDITED = 16  # tries of which accusations are heard
_REMEMBERED = 256  # rounds whose votes and outcomes are kept, for those who ask late …
_REMEMBERED_MEMBERS = 1 << 16  # … if they have no more members than so many together: a member takes about 1 KiB
_DECLINING = 60.0  # seconds that the leader may take to begin its own part and hear that a member takes none
_LAST = 5  # committed tries, by which the next one is planned
_KEPT = 20.0  # seconds that averages which were committed are given away; their file serves longer


logger = logging.getLogger(__name__)

# What a round committed, from those who keep it on disk: averages and parts; None: nobody gives it.
FetchCommitted: TypeAlias = Callable[
    [Group, Plan, bytes], Awaitable[tuple[list[torch.Tensor], tuple[Average, ...]] | None]
]


class Round(Protocol):
    """What the service needs of a round that runs here."""

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
    """The groups of all tries at a round; that of the first is the round's own."""
    return [group, *(group.derived(f"try {number}") for number in range(1, MOST_TRIES))]


class AllreduceService:
    """Serves the rounds of one averager. All peers that average with each other use the same prefix."""

    def __init__(
        self,
        endpoint: Endpoint,
        prefix: str,
        fetch_committed: FetchCommitted | None = None,
        bans: Bans | None = None,
        trust: Trust = "strangers",
    ) -> None:
        """`fetch_committed`: from where a member that was late may get what its group committed. `bans`: of the run;
        None: of these rounds alone. `trust`: as in AllreduceOptions."""
        self.endpoint = endpoint
        self.bans = bans if bans is not None else Bans(endpoint.events.emit)
        self._trust = trust
        self.fetch_committed = fetch_committed
        self.memory = ReusableBuffer()
        self.prefix = prefix
        self.took: deque[tuple[float, int]] = deque(maxlen=_LAST)  # by the slowest sender, over so many bytes
        self.committed = -math.inf  # loop time of the last try that did
        self._rounds: dict[bytes, Round] = {}
        self._audits: Recent[bytes, Audits] = Recent(_AUDITED)  # of the last tries: some accusations come late
        self._expected: dict[bytes, Group] = {}
        self._votes: OrderedDict[bytes, RoundVotes] = OrderedDict()  # of rounds that are or were here
        self._kept: dict[bytes, Holdings] = {}  # of the round that was committed last, by step
        self._forget: asyncio.TimerHandle | None = None
        self._beginning: WeakValueDictionary[bytes, Bell] = WeakValueDictionary()  # by group, while calls wait for it
        self._closed = False

    def start(self) -> None:
        """Begins to answer. Raises ValueError if another service of this endpoint has the same prefix."""
        serve, method = self.endpoint.serve, self.method
        self._unsubscribe = self.bans.subscribe(self._on_ban)
        self.endpoint.serve_stream(method("exchange"), OpenExchange, self._exchange)
        self.endpoint.serve_stream(method("copy"), CopyRequest, self._copy)
        self.endpoint.serve_stream(method("inputs"), InputsRequest, self._inputs)
        self.endpoint.serve_stream(method("accuse"), AccusationHeader, self._accusation)
        serve(method("vote"), consensus.VoteMessage, self._vote)
        serve(method("outcome"), consensus.OutcomeQuestion, self._outcome)
        serve(method("absence"), consensus.AbsenceNotice, self._absence)
        serve(method("presence"), consensus.PresenceQuestion, self._presence)
        serve(method("prepare"), consensus.Prepare, self._prepare)
        serve(method("propose"), consensus.Propose, self._propose)
        serve(method("confirm"), consensus.Confirm, self._confirm)
        serve(method("compare"), consensus.Compare, self._compare)
        serve(method("holdings"), consensus.HoldingsQuestion, self._holdings)

    def close(self) -> None:
        """Answers nobody any more; whoever waits for a round that has not begun is refused. Idempotent."""
        if not self._closed:
            self._closed = True
            self._unsubscribe()
            self.endpoint.withdraw(*(self.method(name) for name in (*_CALLS, *_STREAMS)))
            self.release()
            self.memory.forget()
            self._tell_begun(list(self._beginning))

    def method(self, name: str) -> str:
        """The full name of a method on the wire."""
        return f"allreduce.{name}.{self.prefix}"

    # Rounds that come and go

    @contextmanager
    def expecting(self, *groups: Group) -> Iterator[None]:
        """While the block runs, the others are told that this member will take part, however long it computes."""
        self._expected.update((group.group_id, group) for group in groups)
        try:
            yield
        finally:
            for group in groups:
                del self._expected[group.group_id]

    @contextmanager
    def hosting(self, round_: Round) -> Iterator[RoundVotes]:
        """While the block runs, the round gets what arrives for it. Raises RoundFailed if it has been here before: then
        its leader has sent an old group again, and nobody may vote twice."""
        group_id = round_.group.group_id
        if group_id in self._votes and self._votes[group_id].begun:
            raise RoundFailed("its group has had a round before", [round_.group.leader])
        if self.has_split(round_.group):
            raise RoundUndecided("its leader has begun another group at the same time")  # others may decide it
        votes = self._votes_for(round_.group, round_.trust)
        votes.begun = True
        self._rounds[group_id] = round_
        if round_.audits is not None:
            self._forget_inputs()  # those of the try before
            self._audits[group_id] = round_.audits
        self._tell_begun([group_id])
        try:
            yield votes
        finally:
            del self._rounds[group_id]
            votes.over = True

    def has_split(self, group: Group) -> bool:
        """Whether its leader is known to have begun another one in the same search."""
        proof = self.bans.proof(group.leader)
        return isinstance(proof, TwoGroups) and proof.search == group.members[0].search

    def leave(self, *groups: Group) -> None:
        """This member will not take part in rounds that it was expected in. It still promises, so that the others need
        not wait for its silence."""
        for group in groups:
            votes = self._votes_for(group, self._trust)
            votes.begun = votes.over = True
        self._tell_begun([group.group_id for group in groups])

    async def decline(self, group: Group) -> None:
        """This member takes no part in a round of which the others know, so that they go on without it."""
        if self.endpoint.peer_id not in group:
            return  # whoever began it has made it up
        self.leave(*tries(group))
        if group.leader == self.endpoint.peer_id:
            return  # whoever asks it for the outcome is told that it does not know, and follows the next in rank
        vote = consensus.VoteMessage(group.group_id, None, "it left before the round began")
        try:
            await self.endpoint.call(group.leader, self.method("vote"), vote, consensus.Noted, timeout=_DECLINING)
        except NetworkError as error:
            logger.debug("the leader did not hear that this peer has left: %s", error)

    async def note_absence(self, group: Group, member: PeerID, reason: str) -> None:
        """At the leader: a member could not be told that the group begins, so nobody need wait for it."""
        words = f"it did not learn that the round began: {reason}"[: consensus.MAX_WORDS]
        try:
            await self._take_vote(member, consensus.VoteMessage(group.group_id, None, words))
        except CallRefused as error:
            logger.debug("the round is over without %s: %s", member.short, error)

    def keep(self, group_id: bytes, holdings: Holdings) -> None:
        """Averages that were committed, for members that lack some; until the next round, and not for long."""
        self._kept[group_id] = holdings
        if self._forget is not None:
            self._forget.cancel()
        self._forget = asyncio.get_running_loop().call_later(_KEPT, self.release)

    def release(self) -> None:
        """Lets go of the averages that are kept, and of the inputs of parts that were reduced here."""
        self._kept.clear()
        self._forget_inputs()
        if self._forget is not None:
            self._forget.cancel()
            self._forget = None

    # What arrives

    @forgetful
    async def _exchange(self, peer: PeerID, request: OpenExchange, stream: Stream) -> None:
        self.bans.check(peer)
        self._compare_lists(request)
        round_, member = await self._running(peer, request.group_id)
        await round_.take_stream(member, request, stream)

    @forgetful
    async def _copy(self, peer: PeerID, request: CopyRequest, stream: Stream) -> None:
        self.bans.check(peer)
        holdings = await self._held_for(peer, request.group_id)
        if holdings is None:
            raise CallRefused("over", "the averages of this round are not here any more")
        await give_copies(holdings, request, stream)

    @forgetful
    async def _inputs(self, peer: PeerID, request: InputsRequest, stream: Stream) -> None:
        audits, member = await self._audited(peer, request.group_id)
        await audits.give(member, request, stream)

    @forgetful
    async def _accusation(self, peer: PeerID, header: AccusationHeader, stream: Stream) -> None:
        self.bans.check(peer)
        audits, member = await self._audited(peer, header.group_id)
        await audits.hear(member, header, stream)
        if header.group_id in self._rounds:
            self._rounds[header.group_id].drop_false()

    async def _vote(self, peer: PeerID, message: consensus.VoteMessage) -> consensus.Noted:
        await self._take_vote(peer, message)
        return consensus.Noted()

    async def _take_vote(self, peer: PeerID, message: consensus.VoteMessage) -> None:
        """Once the round has begun here. Raises CallRefused if it does not, or is over."""
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
        answer = await confirm(Mates(self.endpoint, self.method, votes.group), votes, message.prepared)
        self._settle(message.group_id, votes)
        return answer

    async def _compare(self, peer: PeerID, message: consensus.Compare) -> consensus.CompareAnswer:
        """Answered at once, also by a member that is expected: it must know of the certificate when it begins."""
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
        """What was learned by the way ends the round here: a decision, or that too many members voted twice."""
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
        """Nobody decides a round whose leader has begun another one with the same members: this member takes no further
        part. Raises CallRefused."""
        known = {*self._expected, *self._votes}
        for group in self._expected.values():
            if request.group_id not in known and group.has_listed(request.group_id, request.listed):
                ids, signatures = (group.group_id, request.group_id), (group.listed, request.listed)
                self.bans.add(TwoGroups(group.leader, group.members[0].search, ids, signatures))
                for round_ in self._rounds.values():  # its leader may have been banned for something else before
                    if round_.group.leader == group.leader:
                        round_.agreement.stop()
                raise CallRefused("unknown", "the leader has begun another group at the same time")

    def _on_ban(self, culprit: PeerID) -> None:
        """Nobody decides a round whose leader has begun two groups: who hears of it does not wait for that."""
        for round_ in self._rounds.values():
            if round_.group.leader == culprit and self.has_split(round_.group):
                round_.agreement.stop()

    # Finding the round

    async def _audited(self, peer: PeerID, group_id: bytes) -> tuple[Audits, int]:
        """The audits of a try, which may be over here, and who asks. Raises CallRefused."""
        member = (await self._begun(group_id)).member(peer)
        if group_id not in self._audits:
            raise CallRefused("over", "this try is not audited here, or long over")
        return self._audits[group_id], member

    def _forget_inputs(self) -> None:
        """Nobody is given the inputs of earlier tries any more."""
        for group_id, audits in self._audits.items():
            if group_id not in self._rounds:
                audits.close()

    async def _running(self, peer: PeerID, group_id: bytes) -> tuple[Round, int]:
        """The round that runs here, and who asks. Raises CallRefused."""
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
            async with asyncio.timeout(_EARLY):
                while group_id not in self._votes or not self._votes[group_id].begun:
                    if self._closed:
                        raise CallRefused("over", "this averager is closed")
                    await self._beginning.setdefault(group_id, Bell()).wait()
        except TimeoutError:
            raise CallRefused("unknown", "this round has not begun here") from None
        return self._votes[group_id]

    def _tell_begun(self, group_ids: Iterable[bytes]) -> None:
        """Wakes the calls that wait for these groups to begin here, and no others: strangers may have many wait."""
        for group_id in group_ids:
            if (bell := self._beginning.get(group_id)) is not None:
                bell.ring()

    def _accuse(self, proof: DoubleVote) -> None:
        """A member has voted twice: it is banned."""
        self.bans.add(proof)
        if proof.group_id in self._votes:
            self._settle(proof.group_id, self._votes[proof.group_id])

    def _votes_for(self, group: Group, trust: Trust) -> RoundVotes:
        """Kept until so many others have come that nobody asks any more; what is forgotten is never answered again."""
        votes = self._votes.get(group.group_id)
        if votes is None:
            votes = RoundVotes(group, self.endpoint.identity, trust, self._accuse, self.endpoint.prefix)
            self._votes[group.group_id] = votes
        for group_id in [each for each in self._votes if each not in self._rounds and each != group.group_id]:
            members = sum(len(each.group) for each in self._votes.values())
            if len(self._votes) <= _REMEMBERED and members <= _REMEMBERED_MEMBERS:
                break
            del self._votes[group_id]
        return votes
