"""How fast the mean spreads, in groups that peers find among all others, round after round.

arXiv 2103.03239. On a grid (section 3.2) with M^d peers in groups of M, d rounds give everyone the exact mean. When
peers are split at random into r groups, each round multiplies the expected variance by (r - 1)/N + r/N² (theorem 3.2),
which for a given split of any sizes is (r - 1)/(N - 1).
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterable

import pytest

from swarmcli.network.identity import PeerID
from tests.averaging.searchers import Searcher, Searchers
from tests.simulation import within
from tests.suites import soak

GRIDS = [(8, 2, 3, 2), (16, 8, 2, 1), (64, 4, 3, 4)]  # peers, group size, rounds to the mean, bits


class Values:
    """One number for each peer, which becomes the mean of its group when the group begins."""

    def __init__(self, peers: Iterable[PeerID]) -> None:
        self.of = {peer: float(number) for number, peer in enumerate(peers)}
        self.first = self.variance

    @property
    def variance(self) -> float:
        return statistics.pvariance(self.of.values())

    def average(self, members: Iterable[PeerID]) -> None:
        members = list(members)
        mean = statistics.fmean(self.of[peer] for peer in members)
        self.of.update((peer, mean) for peer in members)


def grid(peers: int, bits: int) -> list[str]:
    return [f"{number % 2**bits:0{bits}b}" for number in range(peers)]


async def spread_mean(swarm: Searchers, peers: list[Searcher], rounds: int) -> list[tuple[float, float]]:
    """Runs rounds in which all of these begin within 0.3 s. Returns what is left of the variance after each round, and
    what random groups are expected to leave."""
    values, seen, left = Values(peer.peer_id for peer in peers), set(), []
    expected = 1.0

    async def find(peer: Searcher) -> None:
        await asyncio.sleep(swarm.random.uniform(0.0, 0.3))
        group = await peer.find()
        assert group is not None
        if group.group_id not in seen:
            seen.add(group.group_id)
            values.average(member.peer_id for member in group.members)

    for _ in range(rounds):
        async with asyncio.timeout(100):
            before = len(seen)
            await asyncio.gather(*(find(peer) for peer in peers))
        expected *= (len(seen) - before - 1) / (len(peers) - 1)
        left.append((values.variance / values.first, expected))
    return left


@pytest.mark.parametrize(("count", "size", "rounds", "bits"), [GRIDS[0], *soak(GRIDS[1:])])
@within(3600)
async def test_a_grid_of_searches_gives_everyone_the_mean(count: int, size: int, rounds: int, bits: int) -> None:
    more = 0 if count > 16 else 2  # the grid stays one

    async with Searchers(0, target_group_size=size) as swarm:
        peers = [await swarm.add(initial_group_bits=bucket) for bucket in grid(count, bits)]
        await asyncio.sleep(1)
        for left, _ in (await spread_mean(swarm, peers, rounds + more))[rounds - 1 :]:
            assert left < 1e-18
        assert {len(group) for peer in peers for group in peer.groups} == {size}
        assert max(wait for peer in peers for wait in peer.waits) < 1.5


async def mix(seed: int, count: int, size: int, rounds: int) -> list[tuple[float, float]]:
    """Runs rounds of `count` peers in random groups of at most `size`; see `spread_mean`."""
    async with Searchers(seed, target_group_size=size) as swarm:
        peers = [await swarm.add() for _ in range(count)]
        await asyncio.sleep(1)
        return await spread_mean(swarm, peers, rounds)


@pytest.mark.parametrize("seed", [0, 2, 3, *soak([1, 4, 5])])
@within(3600)
async def test_those_who_come_back_from_a_round_together_are_not_in_one_group_again_and_again(seed: int) -> None:
    """With seeds 2 and 3 two groups begin half a second apart, and would alternate."""
    async with Searchers(seed, target_group_size=4) as swarm:
        peers = [await swarm.add() for _ in range(8)]
        await asyncio.sleep(10)
        await search_for(15, peers)
        for peer in peers:
            assert len({member.peer_id for group in peer.groups for member in group.members}) == 8


@within(3600)
async def test_a_crowd_waits_twice_at_most_for_peers_that_look_for_no_group_any_more() -> None:
    async with Searchers(0, target_group_size=4) as swarm:
        peers = [await swarm.add() for _ in range(8)]
        await asyncio.sleep(10)
        await asyncio.gather(*(peer.find() for peer in peers))
        await search_for(15, peers[:4])
        for peer in peers[:4]:
            assert sum(wait > 0.2 for wait in peer.waits[1:]) <= 2
            assert max(peer.waits) < 1.5


async def search_for(seconds: float, peers: list[Searcher]) -> None:
    """The peers look for a group, are in a round for a second, and look again."""
    searches = [asyncio.create_task(peer.keep_searching(lambda: 1.0)) for peer in peers]
    await asyncio.sleep(seconds)
    for search in searches:
        search.cancel()
    await asyncio.gather(*searches, return_exceptions=True)
