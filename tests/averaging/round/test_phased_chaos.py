"""Members killed, frozen and cut off at drawn times of rounds of two phases: one outcome, of the same peers in both."""

from __future__ import annotations

import asyncio
import random

import pytest

from swarmcli.averaging import RoundResult
from swarmcli.errors import RoundFailed, SwarmError
from tests.averaging.averagers import Averagers, Peer, all_outcomes
from tests.averaging.round.programs import add, check, untouched
from tests.simulation import within
from tests.suites import soak

FAULTS = ("kill", "freeze", "cut", "leave")


def strike(swarm: Averagers, what: str, victim: Peer, others: list[Peer], control) -> None:
    loop = asyncio.get_running_loop()
    if what == "kill":
        swarm.kill(victim)
    elif what == "freeze":
        swarm.network.freeze(victim.peer_id)
        loop.call_later(30.0, swarm.network.thaw, victim.peer_id)
    elif what == "cut":
        swarm.network.partition([other.peer_id for other in others], [victim.peer_id])
        loop.call_later(60.0, swarm.network.heal)
    else:
        control.cancel()


def check_outcomes(values: dict[Peer, tuple[float, float]], outcomes: dict[Peer, RoundResult | SwarmError]) -> None:
    """By group: whoever applied has the same bits, made of the contributors of both phases; nobody failed beside it."""
    applied = {peer: outcome for peer, outcome in outcomes.items() if isinstance(outcome, RoundResult)}
    for group_id in {result.group.group_id for result in applied.values()}:
        members = [peer for peer, result in applied.items() if result.group.group_id == group_id]
        assert len({applied[peer].contributors for peer in members}) == 1
        assert applied[members[0]].total_weight > 0
        check(members, values, applied[members[0]])
    for peer, outcome in outcomes.items():
        assert isinstance(outcome, RoundResult) or untouched(peer)
    if any(isinstance(outcome, RoundFailed) for outcome in outcomes.values()):
        ids = {result.group.group_id for result in applied.values()}
        last = [peer.rounds[-1] for peer, o in outcomes.items() if isinstance(o, RoundFailed) and peer.rounds]
        assert not any(bytes.fromhex(event.round_id) in ids for event in last)


@pytest.mark.parametrize("seed", [*range(12), *soak(range(12, 60))])
@within(3600)
async def test_a_round_of_two_phases_under_faults(seed: int) -> None:
    draw = random.Random(seed)

    async with Averagers(seed) as swarm:
        count = draw.randint(3, 6)
        values = {await add(swarm, float(i + 1)): (float(i + 1), draw.choice([1.0, 2.0, 0.5])) for i in range(count)}
        helper = await add(swarm, 0.0, auxiliary=True) if draw.random() < 0.3 else None
        peers = [*values, *([helper] if helper else [])]
        weights = [values[peer][1] if peer in values else 0.0 for peer in peers]
        controls = [peer.begin(weight=w, allow_retries=False) for peer, w in zip(peers, weights, strict=True)]
        begun = [asyncio.wrap_future(control.begun) for control in controls]
        await asyncio.wait(begun)
        for peer in peers:
            swarm.network.set_bandwidth(peer.peer_id, draw.choice([8000.0, 20_000.0, None]))
        hit: list[int] = []
        for _ in range(draw.choice([0, 1, 1, 2])):
            await asyncio.sleep(draw.choice([0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8]))
            victim = draw.randrange(1, count)  # never the first contact of the hash table
            if victim not in hit:
                hit.append(victim)
                rest = [peer for peer in peers if peer is not peers[victim]]
                strike(swarm, draw.choice(FAULTS), peers[victim], rest, controls[victim])
        left = [index for index in range(len(peers)) if index not in hit]
        outcomes = dict(zip([peers[i] for i in left], await all_outcomes([controls[i] for i in left]), strict=True))
        check_outcomes(values, {peer: outcome for peer, outcome in outcomes.items() if peer in values})
        if not hit:
            assert all(isinstance(o, RoundResult) for o in outcomes.values()), outcomes
        for index in hit:
            controls[index].cancel()
        await asyncio.sleep(0)
