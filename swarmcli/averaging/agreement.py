"""How the members of one round come to know its outcome: the votes, questions and answers around `outcome.py`.

Every follower asks the leader for the outcome when its round begins, and the answer is the decision itself. So a
decision costs one message to each, and either end notices at once when the other is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from swarmcli.averaging.group import Group
from swarmcli.averaging.messages import MAX_WORDS, AbsenceNotice, Noted, OutcomeAnswer, OutcomeQuestion, VoteMessage
from swarmcli.averaging.outcome import Decision, Hearsay, Reject, Tally, Vote
from swarmcli.averaging.patience import AllreduceOptions
from swarmcli.errors import NetworkError
from swarmcli.network import Endpoint, PeerID

_LOOKS, _LOOK_AGAIN = 20, 0.25  # times and seconds, for a member that is not connected when the round begins
_CALL_TIMEOUT = 10.0  # seconds for what is answered at once
_GRACE = 10.0  # seconds that a follower waits beyond the leader's own deadline
_UNBOUNDED = 1e7  # seconds, for a call that ends with its connection or with a deadline around it


class RoundContext(Protocol):
    """What an agreement needs of the service around it."""

    endpoint: Endpoint

    def method(self, name: str) -> str: ...
    def remember(self, group_id: bytes, decision: Decision) -> None: ...


class Agreement(Protocol):
    """One member's part in agreeing on the outcome of a round."""

    async def run(self) -> Decision | None:
        """Takes part until the outcome is known, or (None) known to stay unknown here."""

    async def cast(self, vote: Vote) -> None:
        """This member's own vote. Does not fail: whoever cannot hear it will notice that by itself."""

    def stop(self, reason: str) -> None:
        """This member leaves the round before its end."""

    async def word(self, asker: int) -> Decision | None:
        """Answers another member: waits until the outcome is known, or (None) known to stay unknown here."""


class Leader:
    """Counts the votes, decides, and answers everyone who asks."""

    def __init__(
        self,
        context: RoundContext,
        group: Group,
        reducers: Iterable[int],
        options: AllreduceOptions,
        absent: Callable[[int, str], None],
    ) -> None:
        """`absent` is told what the reducers are told: who need not be waited for, and why."""
        self._context, self._group, self._options = context, group, options
        self._reducers = sorted(set(reducers) - {0})
        self._absent = absent
        self._tally = Tally(len(group))
        self._asked = {index: asyncio.Event() for index in range(1, len(group))}  # set once it asks for the outcome
        self._decided, self._voted = asyncio.Event(), asyncio.Event()
        self._news: asyncio.Queue[tuple[int, str]] = asyncio.Queue()

    async def run(self) -> Decision | None:
        async with asyncio.TaskGroup() as tasks:
            helpers = [tasks.create_task(work) for work in (self._watch(), self._watch_time(), self._spread_news())]
            await self._decided.wait()
            for helper in helpers:
                helper.cancel()
        # Round and agreement would keep each other alive, and with them all results, until the collector comes.
        self._absent = _tell_nobody
        return self._tally.decision

    async def cast(self, vote: Vote) -> None:
        self._voted.set()
        self.hear(0, vote)

    def hear(self, voter: int, vote: Vote) -> None:
        """A vote has arrived."""
        self._tally.vote(voter, vote)
        if isinstance(vote, Reject) and voter != 0:
            self._news.put_nowait((voter, f"it has left the round: {vote.reason}"))
        self._check()

    def stop(self, reason: str) -> None:
        self._tally.give_up(reason)
        self._check()

    async def word(self, asker: int) -> Decision | None:
        self._asked[asker].set()
        try:
            await self._decided.wait()
        except asyncio.CancelledError:
            self._lose(asker, "its connection to the leader ended")
            raise
        return self._tally.decision

    def _lose(self, member: int, reason: str) -> None:
        if self._tally.decision is None:
            self._tally.lose(member, f"{self._group.members[member].peer_id.short}: {reason}")
            self._news.put_nowait((member, reason))
            self._check()

    def _check(self) -> None:
        decision = self._tally.decision
        if decision is not None and not self._decided.is_set():
            self._context.remember(self._group.group_id, decision)
            self._decided.set()

    async def _watch(self) -> None:
        """Loses members that never ask: those whose connection ends before, and those that do not begin in time."""
        async with asyncio.TaskGroup() as tasks:
            for member in self._asked:
                tasks.create_task(self._watch_beginning(member))

    async def _watch_beginning(self, member: int) -> None:
        peer = self._group.members[member].peer_id
        try:
            async with asyncio.timeout(self._options.to_begin):
                gone = await self._gone_before(self._asked[member], peer)
        except TimeoutError:
            gone = "it did not begin in time"
        if gone:
            self._lose(member, gone)

    async def _gone_before(self, asked: asyncio.Event, peer: PeerID) -> str:
        """Waits until a member asks for the outcome ("") or its connection has ended before that (why)."""
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(asked.wait())
            for _ in range(_LOOKS):  # its connection may still be on its way
                if not self._context.endpoint.is_connected(peer):
                    await asyncio.wait([asking], timeout=_LOOK_AGAIN)
            lost = self._context.endpoint.lost(peer)
            either: list[asyncio.Future[Any]] = [asking, lost]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            reason = "" if asking.done() else f"it was gone before it began: {lost.result()}"
            asking.cancel()
            lost.cancel()
        return reason

    async def _watch_time(self) -> None:
        """Gives up at the deadline; without one, when votes stay out long after this member's own."""
        try:
            async with asyncio.timeout(self._options.allreduce_timeout):
                await self._voted.wait()
                await asyncio.sleep(self._options.for_reducer)
            self.stop(f"not all members have voted within {self._options.for_reducer:.0f} s after the leader")
        except TimeoutError:
            self.stop(f"the round took longer than its {self._options.allreduce_timeout:.0f} s")

    async def _spread_news(self) -> None:
        """Tells the reducers whom they need not wait for."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                member, reason = await self._news.get()
                self._absent(member, reason)
                notice = AbsenceNotice(self._group.group_id, member, reason[:MAX_WORDS])
                for reducer in self._reducers:
                    if reducer != member:
                        tasks.create_task(self._tell(self._group.members[reducer].peer_id, notice))

    async def _tell(self, peer: PeerID, notice: AbsenceNotice) -> None:
        try:
            await self._context.endpoint.call(
                peer, self._context.method("absence"), notice, Noted, timeout=_CALL_TIMEOUT
            )
        except NetworkError:
            return  # the reducer's own patience does the same, later


class Follower:
    """Votes, and learns the decision from the leader or, when that is lost, from whoever knows it."""

    def __init__(self, context: RoundContext, group: Group, me: int, options: AllreduceOptions) -> None:
        self._context, self._group, self._options = context, group, options
        others = [index for index in range(1, len(group)) if index != me]
        self._hearsay = Hearsay(others)
        self._settled, self._voted = asyncio.Event(), asyncio.Event()
        self._answerable = asyncio.Event()  # settled, or no longer following the leader

    async def run(self) -> Decision | None:
        async with asyncio.TaskGroup() as tasks:
            helpers = [tasks.create_task(work) for work in (self._watch_time(), self._learn())]
            await self._settled.wait()
            for helper in helpers:
                helper.cancel()
        return self._hearsay.decision

    async def cast(self, vote: Vote) -> None:
        self._voted.set()
        message = VoteMessage.of(self._group.group_id, vote)
        try:
            await self._context.endpoint.call(
                self._group.leader, self._context.method("vote"), message, Noted, timeout=self._options.for_reducer
            )
        except NetworkError:
            return  # the question that waits at the leader ends the same way, and says what follows

    def stop(self, reason: str) -> None:
        self._answerable.set()
        self._settled.set()

    async def word(self, asker: int) -> Decision | None:
        # Two members that have both lost the leader must not wait for each other.
        await self._answerable.wait()
        return self._hearsay.decision

    async def _learn(self) -> None:
        answer = await self._ask(self._group.leader)
        if answer is not None:
            self._hear(answer)
            return
        self._answerable.set()
        async with asyncio.TaskGroup() as tasks:
            for member in self._hearsay.lose_leader():
                tasks.create_task(self._ask_member(member))
        self.stop("nobody knows")

    async def _ask_member(self, member: int) -> None:
        try:
            async with asyncio.timeout(self._options.for_reducer):
                answer = await self._ask(self._group.members[member].peer_id)
        except TimeoutError:
            answer = None
        if answer is None:
            self._hearsay.no_answer(member)
        else:
            self._hear(answer)

    async def _ask(self, peer: PeerID) -> Decision | None:
        """None: it does not know and never will, or cannot be reached."""
        question = OutcomeQuestion(self._group.group_id)
        method = self._context.method("outcome")
        try:
            answer = await self._context.endpoint.call(peer, method, question, OutcomeAnswer, timeout=_UNBOUNDED)
        except NetworkError:
            return None
        return answer.decision()

    def _hear(self, decision: Decision) -> None:
        self._hearsay.heard(decision)
        self._context.remember(self._group.group_id, decision)
        self.stop("decided")

    async def _watch_time(self) -> None:
        try:
            async with asyncio.timeout(_plus_grace(self._options.allreduce_timeout)):
                await self._voted.wait()
                await asyncio.sleep(2 * self._options.for_reducer + _GRACE)
        except TimeoutError:
            pass  # either way the time is up
        self.stop("time is up")


def _tell_nobody(member: int, reason: str) -> None:
    """Stands in when the round is over."""


def _plus_grace(seconds: float | None) -> float | None:
    return None if seconds is None else seconds + _GRACE
