"""How fast the mean spreads, in groups that peers find among all others, round after round.

arXiv 2103.03239. On a grid (section 3.2) with M^d peers in groups of M, d rounds give everyone the exact mean. When
peers are split at random into r groups, each round multiplies the expected variance by (r - 1)/N + r/N² (theorem 3.2),
which for a given split of any sizes is (r - 1)/(N - 1).
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterable
from functools import partial

import pytest

from swarmcli.averaging.config import MatchmakingOptions
from swarmcli.averaging.group import Group, Member
from swarmcli.averaging.matchmaking.declarations import next_bits
from swarmcli.network.identity import PeerID
from tests.averaging.searchers import Searcher, Searchers
from tests.averaging.table import Seat, Table, peer_id
from tests.simulation import within
from tests.suites import soak

SIZE = 16
PERIOD = 3.0  # seconds of a round around the table
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


def play(
    seed: int, bits: list[str], size: int, rounds: int, spread: float = 0.3
) -> tuple[Table, list[list[int]], Values]:
    """Peers that begin in these buckets of one table, and look for a group so often. The numbers of each group, too.

    Each round begins within `spread` seconds; who has moved by then may read what others declared before they moved.
    """
    table = Table(seed, MatchmakingOptions(target_group_size=size))
    values, groups = Values(peer_id(number) for number in range(len(bits))), []

    def sit(number: int, bucket: str, turn: int) -> None:
        table.sit(number, at=turn * PERIOD + table.random.uniform(0.0, spread), bits=bucket)

    def on_group(leader: Seat) -> None:
        assert leader.group is not None
        assert len({table.seats[peer].search.me.bits for peer in leader.group}) == 1, "a group across buckets"
        values.average(leader.group)
        numbers = [int.from_bytes(peer, "big") for peer in leader.group]
        groups.append(numbers)
        members = [Member(peer) for peer in leader.group]
        group = Group.form(b"", members, [1.0] * len(members), table.random.randbytes(16))
        for number, peer in zip(numbers, leader.group, strict=True):
            table.later(0.1, partial(go_on, number, next_bits(leader.search.me.bits, group, peer, size)))

    def go_on(number: int, bucket: str) -> None:
        table.rest(number, bucket)
        turn = int(table.now // PERIOD) + 1
        if turn < rounds:
            sit(number, bucket, turn)

    table.on_group = on_group
    for number, bucket in enumerate(bits):
        table.hold(number, bucket)
        sit(number, bucket, 0)
    table.run(PERIOD * rounds + 5)
    return table, groups, values


def grid(peers: int, bits: int) -> list[str]:
    return [f"{number % 2**bits:0{bits}b}" for number in range(peers)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("peers", "size", "rounds", "bits"), GRIDS)
def test_a_grid_gives_everyone_the_mean(peers: int, size: int, rounds: int, bits: int, seed: int) -> None:
    _, groups, values = play(seed, grid(peers, bits), size, rounds)
    assert [len(group) for group in groups] == [size] * (rounds * peers // size)
    assert values.variance < 1e-18 * values.first
    assert statistics.fmean(values.of.values()) == pytest.approx((peers - 1) / 2)


@pytest.mark.parametrize("seed", range(2))
def test_one_bucket_mixes_like_random_groups(seed: int) -> None:
    """Without bits, ranks split the peers anew at random in each round."""
    table, groups, values = play(seed, [""] * 128, SIZE, 1)
    assert sorted(number for group in groups for number in group) == list(range(128))
    assert 8 <= len(groups) <= 10 and table.messages < 8 * 128
    # The variance of so few means scatters by half or so.
    assert values.variance < 3 * values.first * (len(groups) - 1) / 127, f"seed {seed}"


@pytest.mark.parametrize(
    ("count", "sizes"), [(17, [8, 9]), (33, [11, 11, 11]), (47, [15, 16, 16]), (100, [14, 14, 14, 14, 14, 15, 15])]
)
@pytest.mark.parametrize("seed", range(3))
def test_a_remainder_is_shared_among_all_groups(seed: int, count: int, sizes: list[int]) -> None:
    _, groups, _ = play(seed, [""] * count, SIZE, 1)
    assert sorted(map(len, groups)) == sizes


# The same over the hash table, with messages


async def spread_mean(swarm: Searchers, peers: list[Searcher], rounds: int) -> list[tuple[float, float]]:
    """Rounds in which all of these begin within 0.3 s. What is left of the variance after each, and what would be
    expected of random groups."""
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
    """Rounds of so many peers in random groups of at most `size`; see spread_mean."""
    async with Searchers(seed, target_group_size=size) as swarm:
        peers = [await swarm.add() for _ in range(count)]
        await asyncio.sleep(1)
        return await spread_mean(swarm, peers, rounds)
