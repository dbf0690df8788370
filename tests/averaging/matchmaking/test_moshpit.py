"""512 peers in groups of 16: everyone is in a group, and the mean spreads as fast as Moshpit averaging should.

arXiv 2103.03239. On a grid (section 3.2) with N = M^d peers in groups of M, d rounds give everyone the exact mean; here
N = 512 and M = 16, so ceil(log 512 / log 16) = 3. When peers are split at random into r groups, each round multiplies
the expected variance by (r - 1)/N + r/N² (theorem 3.2), which for a given split of any sizes is (r - 1)/(N - 1).
"""

from __future__ import annotations

import math
import statistics

import pytest

from swarmcli.averaging.config import MatchmakingOptions
from swarmcli.averaging.group import Group, Member
from swarmcli.averaging.matchmaking.bits import next_bits
from swarmcli.network.identity import PeerID
from tests.averaging.table import Table, peer_id

PEERS, SIZE = 512, 16


def find_groups(seed: int, peers: list[int], *, spread: float = 0.3) -> list[list[PeerID]]:
    """The groups that these peers form under one key; nobody may be left over, and most wait for less than a second."""
    table = Table(seed, MatchmakingOptions(target_group_size=SIZE))
    for number in peers:
        table.sit(number, at=table.random.uniform(0, spread))
    table.run(6)
    grouped = sorted(peer for group in table.groups for peer in group)
    assert grouped == sorted(peer_id(number) for number in peers), f"left over with seed {seed}"
    assert all(2 <= len(group) <= SIZE for group in table.groups)
    times = [seat.formed_at for seat in table.seats.values()]
    assert statistics.median(times) < spread + 1.0 and max(times) < table.options.min_matchmaking_time
    assert table.messages < 8 * len(peers)
    return table.groups


def average(values: dict[PeerID, float], groups: list[list[PeerID]]) -> None:
    for group in groups:
        mean = statistics.fmean(values[peer] for peer in group)
        values.update((peer, mean) for peer in group)


@pytest.mark.parametrize("seed", range(2))
def test_the_grid_gives_everyone_the_mean_in_three_rounds(seed: int) -> None:
    """Group bits that begin as a grid of 32 buckets of 16 stay one, and mix as the analysis says."""
    values = {peer_id(number): float(number) for number in range(PEERS)}
    bits = {peer_id(number): f"{number % 32:05b}" for number in range(PEERS)}
    for turn in range(math.ceil(math.log(PEERS) / math.log(SIZE))):
        groups: list[list[PeerID]] = []
        for bucket in sorted(set(bits.values())):
            there = [int.from_bytes(peer, "big") for peer, own in bits.items() if own == bucket]
            groups += find_groups(100 * seed + turn, there)
        assert {len(group) for group in groups} == {SIZE}
        average(values, groups)
        for members in groups:
            group = Group.form(b"", [Member(peer) for peer in members], [1.0] * SIZE, turn.to_bytes(16, "big"))
            bits.update((peer, next_bits(bits[peer], group, peer, SIZE)) for peer in members)
    assert max(values.values()) - min(values.values()) < 1e-9
    assert statistics.fmean(values.values()) == pytest.approx((PEERS - 1) / 2)


@pytest.mark.parametrize(("count", "seed"), [(PEERS, 0), (128, 1), (128, 2)])
def test_one_bucket_mixes_like_random_groups(count: int, seed: int) -> None:
    """Without bits, ranks split the peers anew at random in each round."""
    values = {peer_id(number): float(number) for number in range(count)}
    expected = measured = statistics.pvariance(values.values())
    for turn in range(2):
        groups = find_groups(1000 * seed + turn, list(range(count)))
        assert count // SIZE <= len(groups) <= count // SIZE + 2
        average(values, groups)
        measured = statistics.pvariance(values.values())
        expected *= (len(groups) - 1) / (count - 1)
    # With 32 groups the variance of their means scatters by a quarter or so around that in each round, with 8 by half.
    assert measured < 3 * expected, f"seed {seed}"
    assert statistics.fmean(values.values()) == pytest.approx((count - 1) / 2)


@pytest.mark.parametrize(
    ("count", "groups"), [(17, [8, 9]), (33, [11, 11, 11]), (47, [15, 16, 16]), (100, [14, 14, 14, 14, 14, 15, 15])]
)
@pytest.mark.parametrize("seed", range(3))
def test_a_remainder_is_shared_among_all_groups(seed: int, count: int, groups: list[int]) -> None:
    assert sorted(map(len, find_groups(seed, list(range(count))))) == groups
