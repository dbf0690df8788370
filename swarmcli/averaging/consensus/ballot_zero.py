"""Ballot zero at the leader: members that hold the whole result vote for it, and a majority commits it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarmcli.averaging.consensus.ballot_messages import Propose, ProposeAnswer, VoteMessage
from swarmcli.averaging.consensus.ballots import ZERO, Tally, majority
from swarmcli.averaging.consensus.mates import Mates
from swarmcli.averaging.consensus.outcome import Committed, Decision
from swarmcli.averaging.consensus.votes import RoundVotes
from swarmcli.errors import NetworkError


class BallotZero:
    """Counts until the leader itself has promised a ballot above zero: from then on this one is dead."""

    def __init__(self, mates: Mates, votes: RoundVotes) -> None:
        self.failed = asyncio.Event()  # no majority can be reached any more
        self._mates, self._votes = mates, votes
        self._tally = Tally(len(mates), mates.auxiliaries)
        self._named = asyncio.Event()  # the auxiliaries are to be asked
        self._lost: set[int] = set()

    @property
    def decision(self) -> Decision | None:
        return self._tally.decision

    def hear(self, voter: int, vote: VoteMessage) -> None:
        """A member holds the result, or says that it does not come to hold it. Its first vote stands."""
        if vote.digest is None:
            self.lose(voter)
        elif self._votes.acceptor.promised == ZERO:
            self._tally.accept(voter, vote.digest)
        self._look()

    def lose(self, member: int) -> None:
        """It is out of reach. A vote that it has cast stands, and one that still arrives counts."""
        self._lost.add(member)
        self._tally.lose(member)
        self._look()

    async def ask_auxiliaries(self, heard: Callable[[], None]) -> None:
        """Names the result to them, once that is needed; `heard` is called after each answer."""
        await self._named.wait()
        digest = self._tally.digest_to_name
        if digest is None or self._votes.acceptor.promised > ZERO:
            return
        async with asyncio.TaskGroup() as tasks:
            for member in sorted(self._mates.auxiliaries):
                tasks.create_task(self._ask_auxiliary(member, digest, heard))

    async def _ask_auxiliary(self, member: int, digest: bytes, heard: Callable[[], None]) -> None:
        question = Propose(self._mates.group.group_id, ZERO, Committed(digest))
        try:
            if member == self._mates.me:
                accepted = self._votes.acceptor.accept_zero(digest)
            else:
                accepted = (await self._mates.ask(member, "propose", question, ProposeAnswer)).accepted
        except NetworkError:
            accepted = False
        if accepted and self._votes.acceptor.promised == ZERO:
            self._tally.accept(member, digest)
            self._look()
        else:
            self.lose(member)
        heard()

    def _look(self) -> None:
        if self._tally.decision is not None:
            return
        if self._tally.hopeless:
            self.failed.set()
        if self._tally.digest_to_name is not None and self._auxiliaries_count:
            self._named.set()

    @property
    def _auxiliaries_count(self) -> bool:
        """Whether the votes of those with tensors may not be enough: else auxiliaries need not be troubled."""
        able = set(range(len(self._mates))) - self._mates.auxiliaries - self._lost
        return len(able) < majority(len(self._mates))
