"""Peers that begin apart come together: small groups merge while there is time, and nobody is waited for for long."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.averaging.find.declarations import Declarations
from swarmcli.averaging.find.messages import Candidate, search_id
from tests.averaging.searchers import Searcher, Searchers
from tests.simulation import within
from tests.suites import soak


async def find_apart(peers: list[Searcher], gap: float) -> list[int]:
    """Each begins `gap` seconds after the one before; returns the sizes of their groups."""

    async def find(position: int, peer: Searcher) -> int:
        await asyncio.sleep(gap * position)
        group = await peer.find(timeout=60.0)
        return len(group) if group is not None else 0

    return await asyncio.gather(*(find(position, peer) for position, peer in enumerate(peers)))


def slowest(peers: list[Searcher]) -> float:
    return max(peer.waits[-1] for peer in peers)


@pytest.mark.parametrize(("gap", "size"), [(0.2, None), (1.0, 4), *soak([(0.05, None), (0.2, 4), (0.5, 4)])])
@within(3600)
async def test_peers_that_begin_apart_are_in_one_group_in_each_round(gap: float, size: int | None) -> None:
    async with Searchers(0, target_group_size=size) as swarm:
        peers = [await swarm.add() for _ in range(4)]
        for _ in range(8):
            assert await find_apart(peers, gap) == [4] * 4
            swarm.random.shuffle(peers)
            # The last one completes the group, which begins a few round trips later.
            assert slowest(peers) < 3 * gap + 0.4


@pytest.mark.parametrize("seed", [0, *soak(range(1, 20))])
@within(300)
async def test_who_is_left_over_has_a_seat_in_the_next_group(seed: int) -> None:
    """Seven look and one holds the bucket: four begin without the other three, who share the next groups with them."""
    async with Searchers(seed, latency=0.02, target_group_size=4) as swarm:
        _, *peers = [await swarm.add() for _ in range(8)]
        await asyncio.sleep(10)
        searches = [asyncio.create_task(peer.keep_searching(lambda: 0.1)) for peer in peers]
        await asyncio.sleep(4)
        for search in searches:
            search.cancel()
        await asyncio.gather(*searches, return_exceptions=True)
        assert {len(group) for peer in peers for group in peer.groups} <= {3, 4}
        taken = [len(peer.groups) for peer in peers]
        assert 2 * min(taken) >= max(taken)
        assert max(wait for peer in peers for wait in peer.waits) < 1.5


async def stall_now_and_then(swarm: Searchers) -> None:
    """Every few seconds one peer freezes for 1 to 2.5 s; its connections stand."""
    while True:
        await asyncio.sleep(swarm.random.expovariate(0.3))
        peer = swarm.random.choice(swarm.peers).peer_id
        swarm.network.freeze(peer)
        await asyncio.sleep(swarm.random.uniform(1.0, 2.5))
        swarm.network.thaw(peer)


@pytest.mark.parametrize("seed", [0, *soak([1, 2, 3])])
@within(3600)
async def test_who_is_slow_is_not_taken_for_lost(seed: int) -> None:
    """The peers stall as on a busy machine, where a process gets no processor for a while."""
    async with Searchers(seed) as swarm:
        peers = [await swarm.add() for _ in range(4)]
        await asyncio.sleep(1)
        async with asyncio.TaskGroup() as tasks:
            stalling = tasks.create_task(stall_now_and_then(swarm))
            for _ in range(12):
                assert await find_apart(peers, 0.3) == [4] * 4
                assert slowest(peers) < 6.0, "min_matchmaking_time and a second"
                swarm.random.shuffle(peers)
                await asyncio.sleep(swarm.random.uniform(0.2, 1.0))
            stalling.cancel()


@within(3600)
async def test_one_that_holds_the_prefix_and_never_looks_costs_one_wait() -> None:
    """This holds whoever leads: the other members of that group have waited too."""
    async with Searchers(0, min_matchmaking_time=3.0) as swarm:
        *peers, idle = [await swarm.add() for _ in range(5)]
        await asyncio.sleep(1)
        waits = []
        for _ in range(6):
            assert await find_apart(peers, 0.05) == [4] * 4
            waits.append(slowest(peers))
        assert 2.5 < waits[0] < 4.0 and max(waits[1:]) < 0.5
        assert await find_apart([idle, *peers], 0.05) == [5] * 5, "it is met again as soon as it looks"
        await idle.finder.stop()
        assert await find_apart(peers, 0.0) == [4] * 4
        assert slowest(peers) < 0.5, "who has left says so"


@within(3600)
async def test_one_that_declares_searches_and_never_comes_costs_two_waits() -> None:
    async with Searchers(0, min_matchmaking_time=3.0) as swarm:
        *peers, liar = [await swarm.add() for _ in range(4)]
        await liar.finder.stop()  # it answers nobody and only declares itself
        declarations, clock = Declarations(liar.node, "test"), liar.node.endpoint.clock
        waits = []
        for _ in range(5):
            declarations.say(Candidate(liar.peer_id, search_id(clock.now(), bytes(8)), b"", False, looking=False))
            await declarations.publish()
            assert await find_apart(peers, 0.0) == [3] * 3
            waits.append(slowest(peers))
        assert sum(wait > 0.5 for wait in waits) <= 2, waits
