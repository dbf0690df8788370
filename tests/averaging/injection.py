"""Faults at chosen steps of a round: before and after every message between members, and at each decision."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from swarmcli.averaging.config import AllreduceOptions, Trust
from swarmcli.averaging.consensus.acceptor import RoundVotes
from swarmcli.averaging.consensus.leader import Agreement
from swarmcli.averaging.consensus.presence import GroupCalls
from swarmcli.averaging.round.allreduce import AllreduceResult
from swarmcli.averaging.round.copying import Copier
from swarmcli.errors import RoundUndecided
from swarmcli.testing import virtual_time
from tests.averaging.rounds import Kind, Outcome, Swarm

BANDWIDTH = 60_000.0  # bytes per second: streams take their time, so that steps differ

Step = tuple[str, int]  # what happens, and at which member


@dataclass
class Steps:
    """Hears of each step. `at`: the number of the step at which `act` is called, once."""

    at: int = -1
    act: Callable[[], None] = lambda: None
    seen: list[Step] = field(default_factory=list)

    def reach(self, what: str, who: int) -> None:
        self.seen.append((what, who))
        if len(self.seen) - 1 == self.at:
            self.act()

    def listen(self, patch: pytest.MonkeyPatch) -> None:
        ask, learn, report, fetch = GroupCalls.ask, RoundVotes.learn, Agreement.vote, Copier.fetch
        steps = self

        async def heard_ask(mates: GroupCalls, index: int, name: str, *rest: Any) -> Any:
            steps.reach(f"before {name}", mates.me)
            answer = await ask(mates, index, name, *rest)
            steps.reach(f"after {name}", mates.me)
            return answer

        def heard_learn(votes: RoundVotes, decided: Any) -> bool:
            steps.reach("learns", votes.me)
            return learn(votes, decided)

        async def heard_report(agreement: Agreement, *rest: Any) -> None:
            steps.reach("has gathered", agreement._mates.me)
            await report(agreement, *rest)

        async def heard_fetch(copier: Copier, *rest: Any) -> str:
            steps.reach("before copying", copier._mates.me)
            answer = await fetch(copier, *rest)
            steps.reach("after copying", copier._mates.me)
            return answer

        patch.setattr(GroupCalls, "ask", heard_ask)
        patch.setattr(RoundVotes, "learn", heard_learn)
        patch.setattr(Agreement, "vote", heard_report)
        patch.setattr(Copier, "fetch", heard_fetch)


@dataclass
class Play:
    """One round with faults: what everyone ended with, and when those that were not hit were done, in seconds."""

    swarm: Swarm
    outcomes: list[Outcome | None]
    hit: set[int]
    took: float

    def check(self) -> None:
        """One outcome; and where a quorum was never hit, all of it knows the outcome, soon."""
        self.swarm.check(self.outcomes)
        well = [index for index in range(len(self.outcomes)) if index not in self.hit]
        quorum = self.swarm.quorum()
        if len(quorum.voters.intersection(well)) >= quorum.to_decide:
            assert not any(isinstance(self.outcomes[index], RoundUndecided) for index in well), self.outcomes
            assert self.took < 60
        for outcome in self.outcomes:
            if isinstance(outcome, AllreduceResult) and outcome.averages:
                self.swarm.check_mean(outcome)


def play(
    kinds: Sequence[Kind],
    steps: Steps,
    faults: Sequence[tuple[str, int]],
    first_at: float | None = None,
    trust: Trust = "strangers",
) -> Play:
    """The last fault happens at the step, one before it (if any) at `first_at` seconds. Frozen members thaw when all
    others are done."""

    async def main() -> Play:
        options = AllreduceOptions(part_size_bytes=512, trust=trust)
        async with Swarm(kinds, bandwidth=BANDWIDTH, options=options) as swarm:
            loop, hit, done = asyncio.get_running_loop(), set[int](), [0.0]

            def strike(what: str, victim: int) -> None:
                hit.add(victim)
                swarm.kill(victim) if what == "kill" else swarm.freeze(victim)

            async def others_end() -> None:
                if first_at is not None:
                    loop.call_later(first_at, strike, *faults[0])
                await asyncio.wait([task for index, task in enumerate(swarm.tasks) if index not in victims])
                done[0] = loop.time()
                for index in victims:
                    swarm.network.thaw(swarm.peers[index].peer_id)

            victims = {victim for _, victim in faults}
            steps.act = lambda: strike(*faults[-1]) if faults else None
            outcomes = await swarm.round(others_end)
            return Play(swarm, outcomes, hit, done[0])

    with pytest.MonkeyPatch.context() as patch:
        steps.listen(patch)
        return virtual_time.run(main(), timeout=2000)


def chosen(seen: Sequence[Step]) -> list[int]:
    """The numbers of the first step of each kind at each member."""
    first: dict[Step, int] = {}
    for number, step in enumerate(seen):
        first.setdefault(step, number)
    return sorted(first.values())
