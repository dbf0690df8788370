"""Seats in a group: who shares a network shares them, and whoever is doubted has none."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.averaging.config import MatchmakingOptions
from tests.averaging.searchers import Searcher, Searchers
from tests.simulation import within


async def groups_of(swarm: Searchers, hosts: list[str]) -> list[Searcher]:
    return [await swarm.add(host=host) for host in hosts]


@within(600)
async def test_one_network_has_no_more_seats_than_the_option_says() -> None:
    async with Searchers(1, seats_per_network=2, min_matchmaking_time=2.0) as swarm:
        crowd = await groups_of(swarm, [f"198.51.100.{number}" for number in range(1, 7)])
        others = await groups_of(swarm, ["203.0.113.1", "192.0.2.1"])
        await asyncio.gather(*(peer.find(timeout=5.0) for peer in (*crowd, *others)))
        for group in {group.group_id: group for peer in swarm.peers for group in peer.groups}.values():
            seats = [member for member in group.members if member.peer_id in {peer.peer_id for peer in crowd}]
            assert len(seats) <= 3  # two followers, and the leader, who cannot be counted out by itself


@pytest.mark.parametrize("hosts", [["192.168.1.1", "192.168.1.2", "192.168.1.3", "192.168.1.4"], ["", "", "", ""]])
@within(600)
async def test_a_local_network_is_not_counted(hosts: list[str]) -> None:
    async with Searchers(2, seats_per_network=1) as swarm:
        peers = await groups_of(swarm, hosts)
        groups = await asyncio.gather(*(peer.find(timeout=5.0) for peer in peers))
        assert all(group is not None and len(group) == 4 for group in groups)


@pytest.mark.parametrize("seats", [0, -1])
def test_seats_are_checked(seats: int) -> None:
    with pytest.raises(ValueError, match="seats_per_network"):
        MatchmakingOptions(seats_per_network=seats)
