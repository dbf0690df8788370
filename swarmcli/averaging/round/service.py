"""The rounds of one averager on the network: its methods, streams that come before their round, questions after it."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakValueDictionary

from swarmcli.averaging.certificate import Quorum
from swarmcli.averaging.config import Trust
from swarmcli.averaging.group import Group
from swarmcli.averaging.round.agreement import Agreement, Met
from swarmcli.averaging.round.auditing import Audits
from swarmcli.averaging.round.buffers import Holdings
from swarmcli.averaging.round.copying import give_copies
from swarmcli.averaging.round.mates import GroupMates
from swarmcli.averaging.round.messages import Accusation, CopyRequest, DrawnPart, InputList, OpenExchange, RoundWord
from swarmcli.averaging.round.outcome import RoundOutcome
from swarmcli.averaging.trust import PeerTrust, TwoGroups
from swarmcli.concurrency import Bell, forgetful
from swarmcli.errors import CallRefused, RoundFailed, RoundUndecided
from swarmcli.memory import ReusableBuffer
from swarmcli.network import Endpoint, PeerID, Stream
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.task_owner import TaskOwner
from swarmcli.recent import Recent

MOST_PHASES = 4  # of a round
EARLY = 120.0  # seconds that a stream waits for its round to begin here: this member may still be computing
KEPT = 20.0  # seconds that this member gives committed averages to members of its group that lack some
AUDITED = 16  # last exchanges about which this member hears accusations
REMEMBERED = 256  # rounds whose words are kept, for late questions …
REMEMBERED_MEMBERS = 1 << 16  # … if they have no more members together: a member takes about 1 KiB
LAST = 5  # committed exchanges, by which the next one is planned
AT_THE_END = 1.0  # seconds that an ending averager takes to show the others its last words

logger = logging.getLogger(__name__)


class HostedExchange(Protocol):
    """One phase of a round that runs here, as the service needs it."""

    group: Group
    holdings: Holdings
    audits: Audits | None

    async def take_stream(self, member: int, request: OpenExchange, stream: Stream) -> None: ...


def phases_of(group: Group) -> list[Group]:
    """The groups under whose ids the phases of a round exchange; the first is the round's own."""
    return [group, *(group.derived(f"phase {number}") for number in range(1, MOST_PHASES))]


class AllreduceService:
    """Serves the rounds of one averager. All peers that average with each other use the same prefix."""

    def __init__(
        self,
        endpoint: Endpoint,
        prefix: str,
        peer_trust: PeerTrust | None = None,
        trust: Trust = "strangers",
    ) -> None:
        """`peer_trust`: what the averagers of a run share; None: this one has its own. `trust`: as in
        AllreduceOptions."""
        self.endpoint = endpoint
        self.peer_trust = PeerTrust(endpoint, prefix) if peer_trust is None else peer_trust
        self._trust: Trust = trust
        self.memory = ReusableBuffer()
        self.prefix = prefix
        # Of each of the last committed exchanges the seconds of its slowest sender, and its bytes.
        self.took: deque[tuple[float, int]] = deque(maxlen=LAST)
        self._served: list[str] = []  # full names of methods
        self._expected: dict[bytes, Group] = {}
        self._agreements: OrderedDict[bytes, Agreement] = OrderedDict()  # of rounds here, over or not; oldest first
        self._exchanges: dict[bytes, HostedExchange] = {}
        self._past: Recent[bytes, None] = Recent(MOST_PHASES * REMEMBERED)  # exchanges that are over here
        self._audits: Recent[bytes, Audits] = Recent(AUDITED)  # of the last exchanges: accusations may come late
        self._kept: dict[bytes, Holdings] = {}  # exchange of the last committed round → its averages
        self._copies: dict[PeerID, asyncio.Timeout] = {}  # member that is copying averages → what ends its copy
        self._beginning: WeakValueDictionary[bytes, Bell] = WeakValueDictionary()  # exchange → bell of waiting streams
        self._showing = TaskOwner()
        self._closed = False

    def start(self) -> None:
        """Begins to answer. Raises ValueError if another service of this endpoint has the same prefix."""
        streams: dict[str, tuple[type[Any], Callable[..., Awaitable[None]]]] = {
            "exchange": (OpenExchange, self._exchange),
            "copy": (CopyRequest, self._copy),
            "input": (DrawnPart, self._input),
            "accuse": (Accusation, self._accusation),
        }
        for name, (message, handler) in streams.items():
            self.endpoint.serve_stream(self.method(name), message, handler)
        self.endpoint.serve(self.method("outcome"), RoundWord, self._outcome)
        self.endpoint.serve(self.method("inputs"), DrawnPart, self._inputs)
        self._served = [self.method(name) for name in (*streams, "outcome", "inputs")]

    async def shutdown(self) -> None:
        """Shows the others its last words, for a moment; then answers nobody any more."""
        await asyncio.wait([asyncio.ensure_future(self._showing.join())], timeout=AT_THE_END)
        self.close()
        await self._showing.close()

    def close(self) -> None:
        """Answers nobody any more, and refuses streams that wait for a round to begin. Idempotent."""
        if not self._closed:
            self._closed = True
            self.endpoint.withdraw(*self._served)
            self.make_room()
            self.memory.forget()
            self._tell_begun(list(self._beginning))

    def method(self, name: str) -> str:
        """The full name of a method on the wire."""
        return f"allreduce.{name}.{self.prefix}"

    # Rounds that come and go

    @contextmanager
    def expecting(self, group: Group) -> Iterator[None]:
        """While the block runs, others hear that this member will take part, however long it computes."""
        self._expected[group.group_id] = group
        try:
            yield
        finally:
            self._expected.pop(group.group_id, None)  # a leader may have sent one group for two searches

    @contextmanager
    def hosting(self, group: Group) -> Iterator[Agreement]:
        """While the block runs, this member takes part in a round. Raises RoundFailed if the group has had a round
        here: its leader has sent an old group again, and no member may vote twice. Raises RoundUndecided if the leader
        has begun another group in the same search."""
        agreement = self._agreement_for(group)
        if agreement.begun:
            raise RoundFailed("its group has had a round before", [group.leader])
        if self.has_split(group):
            raise RoundUndecided("its leader has begun another group at the same time")  # others may commit this one
        agreement.begun = True
        try:
            yield agreement
        finally:
            self._leave(agreement)

    def host(self, exchange: HostedExchange) -> None:
        """From now on, and until its round ends, the exchange gets the streams that come for it."""
        group_id = exchange.group.group_id
        self._exchanges[group_id] = exchange
        if exchange.audits is not None:
            self._audits[group_id] = exchange.audits
        self._tell_begun([group_id])

    def has_split(self, group: Group) -> bool:
        """Whether the group's leader is known to have begun another one in the same search."""
        proof = self.peer_trust.proof(group.leader)
        return isinstance(proof, TwoGroups) and proof.search == group.members[0].search

    def decline(self, group: Group) -> None:
        """This member takes no part in a round of which the others know: it tells them that it will never vote."""
        if self.endpoint.peer_id in group:  # a leader may list a group without this member
            self._leave(self._agreement_for(group))

    def _leave(self, agreement: Agreement) -> None:
        agreement.leave()
        ids = [each.group_id for each in phases_of(agreement.mates.group)]
        for group_id in ids:
            self._exchanges.pop(group_id, None)
            self._past[group_id] = None
        self._tell_begun(ids)
        if not self._closed:
            self._showing.spawn(agreement.show())

    def keep(self, group_id: bytes, holdings: Holdings) -> None:
        """Keeps committed averages for members that lack some, until the next round, and KEPT seconds at most."""
        self._kept[group_id] = holdings
        asyncio.get_running_loop().call_later(KEPT, self._kept.pop, group_id, None)

    def make_room(self) -> None:
        """Drops the kept averages, and ends copies of them: a slow copy would hold their memory beside that of each
        later round."""
        self._kept.clear()
        for peer in self._copies:
            self._end_copy(peer)

    def _end_copy(self, peer: PeerID) -> None:
        if peer in self._copies and not self._copies[peer].expired():
            self._copies[peer].reschedule(loop_time())

    # Handlers

    @forgetful
    async def _exchange(self, peer: PeerID, request: OpenExchange, stream: Stream) -> None:
        self.peer_trust.check(peer)
        self._compare_lists(peer, request)
        exchange = await self._begun(request.group_id)
        await exchange.take_stream(_member(exchange.group, peer), request, stream)

    @forgetful
    async def _copy(self, peer: PeerID, request: CopyRequest, stream: Stream) -> None:
        self.peer_trust.check(peer)
        exchange = self._exchanges.get(request.group_id)
        holdings = self._kept.get(request.group_id) if exchange is None else exchange.holdings
        if holdings is None:
            raise CallRefused("over", "the averages of this round are not here")
        if holdings.signed is not None:
            _member(holdings.signed.group, peer)
        self._end_copy(peer)  # each member has one copy at a time
        try:
            async with asyncio.timeout(None) as ends:
                self._copies[peer] = ends
                await give_copies(holdings, request, stream)
        except TimeoutError:
            raise CallRefused("over", "another round has begun, or another copy") from None
        finally:
            if self._copies.get(peer) is ends:
                del self._copies[peer]

    async def _inputs(self, peer: PeerID, request: DrawnPart) -> InputList:
        audits = self._audited(request.group_id)
        return audits.list_inputs(_member(audits.group, peer), request)

    @forgetful
    async def _input(self, peer: PeerID, request: DrawnPart, stream: Stream) -> None:
        audits = self._audited(request.group_id)
        await audits.give(_member(audits.group, peer), request, stream)

    @forgetful
    async def _accusation(self, peer: PeerID, header: Accusation, stream: Stream) -> None:
        self.peer_trust.check(peer)
        audits = self._audited(header.group_id)
        await audits.hear(_member(audits.group, peer), header, stream)

    async def _outcome(self, peer: PeerID, word: RoundWord) -> RoundWord:
        """Answers at once. If this member expects to take part in the round, it keeps what others say about it."""
        agreement, group = self._agreements.get(word.group_id), self._expected.get(word.group_id)
        if agreement is None:
            if group is None or peer not in group:
                return RoundWord(word.group_id, "unknown")
            agreement = self._agreement_for(group)
        return agreement.answer(_member(agreement.mates.group, peer), word)

    def _compare_lists(self, peer: PeerID, request: OpenExchange) -> None:
        """Raises CallRefused if the request shows that the leader of an expected group has begun a second one in the
        same search; the leader is banned."""
        known = self._expected.keys() | self._agreements.keys() | self._exchanges.keys()
        for group in self._expected.values():
            if peer in group and request.group_id not in known and group.has_listed(request.group_id, request.listed):
                ids, signatures = (group.group_id, request.group_id), (group.listed, request.listed)
                self.peer_trust.prove(TwoGroups(group.leader, group.members[0].search, ids, signatures))
                raise CallRefused("unknown", "the leader has begun another group at the same time")

    # Finding the round

    def _audited(self, group_id: bytes) -> Audits:
        if group_id not in self._audits:
            raise CallRefused("over", "this exchange is not audited here, or long over")
        return self._audits[group_id]

    async def _begun(self, group_id: bytes) -> HostedExchange:
        """Waits for an exchange to begin here. Raises CallRefused if it does not, or is over."""
        try:
            async with asyncio.timeout(EARLY):
                while group_id not in self._exchanges:
                    if self._closed or group_id in self._past:
                        raise CallRefused("over", "this round is over here")
                    await self._beginning.setdefault(group_id, Bell()).wait()
        except TimeoutError:
            raise CallRefused("unknown", "this round has not begun here") from None
        return self._exchanges[group_id]

    def _tell_begun(self, group_ids: Iterable[bytes]) -> None:
        """Wakes the calls that wait for these exchanges to begin here, and no others: strangers may make many wait."""
        for group_id in group_ids:
            if (bell := self._beginning.get(group_id)) is not None:
                bell.ring()

    def _agreement_for(self, group: Group) -> Agreement:
        """This member's side of the talk about a round. If there are too many, the service forgets the oldest that are
        over, and answers for them no more."""
        agreement = self._agreements.get(group.group_id)
        if agreement is None:
            met = Met(group, self.endpoint, Quorum.of(group, self._trust))
            outcome = RoundOutcome(group, self.endpoint.identity, self._trust, met)
            agreement = Agreement(GroupMates(self.endpoint, self.method, group), outcome, self.peer_trust)
            self._agreements[group.group_id] = agreement
        for group_id in [each for each, talk in self._agreements.items() if talk.over]:
            members = sum(len(each.mates) for each in self._agreements.values())
            if len(self._agreements) <= REMEMBERED and members <= REMEMBERED_MEMBERS:
                break
            del self._agreements[group_id]
        return agreement


def _member(group: Group, peer: PeerID) -> int:
    """The peer's index in the group. Raises CallRefused for a stranger."""
    if peer not in group:
        raise CallRefused("stranger", "only members of the group take part in its round")
    return group.index_of(peer)
