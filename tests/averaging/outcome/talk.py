"""The talk about an outcome alone: members that have ended their exchange agree on the memory network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from swarmcli.averaging.certificate import Quorum
from swarmcli.averaging.group import Group, Member
from swarmcli.averaging.round.agreement import Agreement, Met
from swarmcli.averaging.round.mates import GroupMates
from swarmcli.averaging.round.messages import RoundWord
from swarmcli.averaging.round.outcome import Action, RoundOutcome
from swarmcli.averaging.shares import reducing_shares
from swarmcli.averaging.trust import PeerTrust
from swarmcli.network import Endpoint, Identity, PeerID, wire
from swarmcli.network.loop_thread import loop_time
from swarmcli.testing import MemoryNetwork

LATENCY = 0.02  # seconds one way
EXCHANGE = 10.0  # seconds that it may take
DIGEST = bytes(range(32))


@dataclass
class Holder:
    """A member that has ended its exchange with all averages."""

    ended: bool = True
    digest: bytes | None = DIGEST
    lacks: tuple[str, tuple[int, ...]] = "", ()
    slow: Set[int] = field(default_factory=set)
    lacking: int = 0

    async def obtain(self, digest: bytes, holder: int, *, last: bool) -> bool:
        return False


class Voter:
    """One member, and what its words weigh."""

    def __init__(self, network: MemoryNetwork, number: int) -> None:
        identity = Identity.from_seed(number)
        host = f"5.{1 + number}.0.1"
        self.endpoint = Endpoint(network.transport(identity, host=host), seed=number)
        self.sent, self.words = 0, 0
        self.agreement: Agreement | None = None
        self.seconds: float | None = None
        self.end: Action | None = None

    @property
    def peer(self) -> PeerID:
        return self.endpoint.peer_id

    def join(self, group: Group) -> None:
        met = Met(group, self.endpoint, Quorum.of(group, "strangers"))
        outcome = RoundOutcome(group, self.endpoint.identity, met=met)
        mates, trust = GroupMates(self.endpoint, lambda name: name, group), PeerTrust(self.endpoint, "test")
        self.agreement = Agreement(mates, outcome, trust)
        ask = self.agreement.mates.ask

        async def counted(index: int, name: str, request: RoundWord, answer: type[RoundWord]) -> RoundWord:
            self._count(request)
            return await ask(index, name, request, answer)

        self.agreement.mates.ask = counted  # type: ignore[method-assign,assignment]

        async def answer(peer: PeerID, word: RoundWord) -> RoundWord:
            assert self.agreement is not None
            answer = self.agreement.answer(group.index_of(peer), word)
            self._count(answer)
            return answer

        self.endpoint.serve("outcome", RoundWord, answer)

    def lie(self, alter: Callable[[RoundWord], RoundWord]) -> None:
        """Whoever asks this voter gets its words as `alter` makes them; it takes part in no other way."""
        assert self.agreement is not None
        word = self.agreement.word
        self.agreement.word = lambda member, **how: alter(word(member, **how))  # type: ignore[method-assign]

    def _count(self, word: RoundWord) -> None:
        self.words += 1
        self.sent += len(wire.encode(word))

    async def end_with(self, parts: Holder | None = None) -> None:
        """Takes part, with these averages, until it knows the outcome or that it will not."""
        assert self.agreement is not None
        self.agreement.begun = True
        self.end = (await self.agreement.run(parts or Holder(), EXCHANGE)).move

    async def agree(self) -> None:
        assert self.agreement is not None
        began = loop_time()
        await self.end_with()
        if self.end is Action.COMMITTED:
            self.seconds = loop_time() - began
        await self.agreement.show()


@asynccontextmanager
async def voters_of(count: int, elsewhere: int = 0) -> AsyncIterator[tuple[MemoryNetwork, list[Voter]]]:
    """`count` strangers, each in a network of its own, connected with each other as after a round's parts. The list
    names the last `elsewhere` of them at addresses in other networks, where nobody answers."""
    network = MemoryNetwork(seed=count, latency=LATENCY)
    voters = [Voter(network, number) for number in range(count)]
    try:
        for number, voter in enumerate(voters):
            await voter.endpoint.start()
            for other in voters[:number]:
                await voter.endpoint.connect(other.endpoint.addresses[0], timeout=10)
        members = [Member(each.peer, True, False, 1.0, each.endpoint.addresses) for each in voters]
        for number in range(count - elsewhere, count):
            members[number] = replace(members[number], addresses=(f"memory://9.{number}.0.1:4000",))
        group = Group.form(b"lineage", members, reducing_shares(members, 1000), bytes(16))
        for voter in voters:
            voter.join(group)
        yield network, voters
    finally:
        for voter in voters:
            network.thaw(voter.peer)
            await voter.endpoint.close()


async def agree(voters: list[Voter]) -> None:
    """Returns when each of these knows the outcome, or that it will stay unknown."""
    await asyncio.gather(*(voter.agree() for voter in voters))
