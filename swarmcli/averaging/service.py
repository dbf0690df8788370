"""Where the rounds of one averager meet the network: its methods, arrivals before their round, late questions."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from swarmcli.averaging.archive import RoundArchive
from swarmcli.averaging.lending import RoundMemory
from swarmcli.averaging.messages import AbsenceNotice, Noted, OpenExchange, OutcomeAnswer, OutcomeQuestion, VoteMessage
from swarmcli.averaging.outcome import Decision, Vote
from swarmcli.averaging.tasks import Bell
from swarmcli.errors import CallRefused
from swarmcli.network import Endpoint, PeerID, Stream

_METHODS = ("exchange", "vote", "outcome", "absence")
_EARLY = 120.0  # seconds that an arrival waits for its round to begin here: this member may still be computing
_REMEMBERED = 256  # outcomes of past rounds, for those who ask late


class Round(Protocol):
    """What the service needs of a round that runs here."""

    group_id: bytes

    async def take_stream(self, peer: PeerID, request: OpenExchange, stream: Stream) -> None: ...
    def take_vote(self, peer: PeerID, vote: Vote) -> None: ...
    def take_absence(self, peer: PeerID, member: int, reason: str) -> None: ...
    async def tell_outcome(self, peer: PeerID) -> Decision | None: ...


class AllreduceService:
    """Serves the rounds of one averager. All peers that average with each other use the same prefix."""

    def __init__(self, endpoint: Endpoint, prefix: str, archive: RoundArchive | None = None) -> None:
        """`archive`: where a member that was late may get what its group committed."""
        self.endpoint = endpoint
        self.archive = archive
        self.memory = RoundMemory()
        self._prefix = prefix
        self._rounds: dict[bytes, Round] = {}
        self._outcomes: OrderedDict[bytes, Decision | None] = OrderedDict()  # of rounds that were here
        self._news = Bell()
        self._closed = False

    def start(self) -> None:
        """Begins to answer. Raises ValueError if another service of this endpoint has the same prefix."""
        self.endpoint.serve_stream(self.method("exchange"), OpenExchange, self._exchange)
        self.endpoint.serve(self.method("vote"), VoteMessage, self._vote)
        self.endpoint.serve(self.method("outcome"), OutcomeQuestion, self._outcome)
        self.endpoint.serve(self.method("absence"), AbsenceNotice, self._absence)

    def close(self) -> None:
        """Answers nobody any more; whoever waits for a round that has not begun is refused. Idempotent."""
        if not self._closed:
            self._closed = True
            self.memory.forget()
            self.endpoint.withdraw(*(self.method(name) for name in _METHODS))
            self._news.ring()

    def method(self, name: str) -> str:
        """The full name of a method on the wire."""
        return f"allreduce.{name}.{self._prefix}"

    def remember(self, group_id: bytes, decision: Decision | None) -> None:
        """Keeps an outcome (None: this member never learned it) for those who ask late. The first word stands."""
        self._outcomes[group_id] = self._outcomes.get(group_id) or decision
        while len(self._outcomes) > _REMEMBERED:
            self._outcomes.popitem(last=False)

    @contextmanager
    def hosting(self, round_: Round) -> Iterator[None]:
        """While the block runs, the round gets what arrives for it. Raises ValueError if it runs already."""
        if round_.group_id in self._rounds:
            raise ValueError("this round runs already")
        self._rounds[round_.group_id] = round_
        self._news.ring()
        try:
            yield
        finally:
            del self._rounds[round_.group_id]
            self.remember(round_.group_id, None)
            self._news.ring()

    async def _exchange(self, peer: PeerID, request: OpenExchange, stream: Stream) -> None:
        round_ = await self._round(request.group_id)
        await round_.take_stream(peer, request, stream)

    async def take_vote(self, peer: PeerID, group_id: bytes, vote: Vote) -> None:
        """A member's vote, once the round has begun here. Raises CallRefused if it does not, or is over."""
        round_ = await self._round(group_id)
        round_.take_vote(peer, vote)

    async def _vote(self, peer: PeerID, message: VoteMessage) -> Noted:
        await self.take_vote(peer, message.group_id, message.vote())
        return Noted()

    async def _absence(self, peer: PeerID, notice: AbsenceNotice) -> Noted:
        round_ = await self._round(notice.group_id)
        round_.take_absence(peer, notice.member, notice.reason)
        return Noted()

    async def _outcome(self, peer: PeerID, question: OutcomeQuestion) -> OutcomeAnswer:
        if self._outcomes.get(question.group_id) is None and not self._is_over(question.group_id):
            round_ = await self._round(question.group_id)
            return OutcomeAnswer.of(await round_.tell_outcome(peer))
        return OutcomeAnswer.of(self._outcomes[question.group_id])

    async def _round(self, group_id: bytes) -> Round:
        """The round that runs here under this id; waits for it to begin. Raises CallRefused."""
        try:
            async with asyncio.timeout(_EARLY):
                while group_id not in self._rounds:
                    if self._closed or self._is_over(group_id):
                        raise CallRefused("over", "this round is over here")
                    await self._news.wait()
        except TimeoutError:
            raise CallRefused("unknown", "this round has not begun here") from None
        return self._rounds[group_id]

    def _is_over(self, group_id: bytes) -> bool:
        return group_id in self._outcomes and group_id not in self._rounds
