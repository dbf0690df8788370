"""Every option of finding a group, each with a swarm that would behave otherwise without it; seats; and how fast."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from swarmcli.averaging.config import MatchmakingOptions
from tests.averaging.searchers import Searcher, Searchers
from tests.simulation import now, within


async def find_all(peers: list[Searcher], **request: Any) -> list[int]:
    """Sizes of the groups that these peers found together, by peer; 0 for none."""
    groups = await asyncio.gather(*(peer.find(**request) for peer in peers))
    return [len(group) if group is not None else 0 for group in groups]


@pytest.mark.parametrize(("size", "expected"), [(None, [6] * 6), (3, [3] * 6), (4, [3] * 6)])
@within(3600)
async def test_target_group_size(size: int | None, expected: list[int]) -> None:
    async with Searchers(0, target_group_size=size) as swarm:
        assert await find_all([await swarm.add() for _ in range(6)]) == expected


@within(3600)
async def test_min_group_size_and_retries() -> None:
    async with Searchers(0, min_group_size=4) as swarm:
        peers = [await swarm.add() for _ in range(3)]
        assert await find_all(peers[:1], allow_retries=False) == [0]
        assert "only 1 of at least 4" in peers[0].failures[0]
        searches = asyncio.gather(find_all(peers))
        await asyncio.sleep(12)
        assert not any(peer.groups for peer in peers)
        late = await swarm.add()
        assert await find_all([late]) == [4] and await searches == [[4, 4, 4]]
        assert late.waits[0] < 1.5


def test_request_timeout_is_kept_below_min_matchmaking_time(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert MatchmakingOptions(request_timeout=9.0, min_matchmaking_time=4.0).request_timeout == 4.0
    assert "request_timeout 9 s is taken as 4 s" in caplog.text
    caplog.clear()
    assert MatchmakingOptions(min_matchmaking_time=1.0).request_timeout == 1.0
    assert MatchmakingOptions(request_timeout=2.0).request_timeout == 2.0
    assert not caplog.records


@pytest.mark.parametrize("timeout", [1.0, 3.0])
@within(3600)
async def test_request_timeout_bounds_the_wait_for_a_silent_peer(timeout: float) -> None:
    """The silent peer's connections stand, so it may only be slow."""
    async with Searchers(1, request_timeout=timeout) as swarm:
        peers = [await swarm.add() for _ in range(3)]
        silent = await swarm.add(listening=False)
        task = asyncio.get_running_loop().create_task(silent.find())
        await asyncio.sleep(2)
        swarm.network.freeze(silent.peer_id)
        assert await find_all(peers) == [3] * 3
        assert all(peer.waits[-1] < timeout + 0.8 for peer in peers)
        task.cancel()
        await asyncio.wait([task])


@within(3600)
async def test_a_group_whose_members_offer_no_bandwidth_says_so_to_all_unless_a_reducer_comes_in_time() -> None:
    async with Searchers(4) as swarm:
        peers = [await swarm.add(bandwidth=0.0) for _ in range(3)]
        began = now()
        assert await find_all(peers) == [0] * 3
        for peer in peers:
            assert "NoReducerError" in peer.failures[0] and "3 offer no bandwidth" in peer.failures[0]
        assert now() - began < 6.0
        searches = asyncio.gather(find_all(peers))
        await asyncio.sleep(3)
        assert await find_all([await swarm.add(bandwidth=1.0)]) == [4] and await searches == [[4] * 3]


@within(3600)
async def test_one_network_has_no_more_seats_than_the_option_says() -> None:
    async with Searchers(1, seats_per_network=2, min_matchmaking_time=2.0) as swarm:
        crowd = [await swarm.add(host=f"198.51.100.{number}") for number in range(1, 7)]
        others = [await swarm.add(host=host) for host in ("203.0.113.1", "192.0.2.1")]
        await find_all([*crowd, *others], timeout=5.0)
        for group in {group.group_id: group for peer in swarm.peers for group in peer.groups}.values():
            seats = [member for member in group.members if member.peer_id in {peer.peer_id for peer in crowd}]
            assert len(seats) <= 3  # two followers, and the leader, who cannot be counted out by itself


@pytest.mark.parametrize("hosts", [[f"192.168.1.{number}" for number in range(1, 5)], [""] * 4])
@within(3600)
async def test_a_local_network_is_not_counted(hosts: list[str]) -> None:
    async with Searchers(2, seats_per_network=1) as swarm:
        assert await find_all([await swarm.add(host=host) for host in hosts], timeout=5.0) == [4] * 4


@pytest.mark.parametrize("seats", [0, -1])
def test_seats_are_checked(seats: int) -> None:
    with pytest.raises(ValueError, match="seats_per_network"):
        MatchmakingOptions(seats_per_network=seats)


@within(3600)
async def test_a_group_forms_in_a_few_round_trips() -> None:
    """Strangers declare and read (2 or 3 round trips), then settle for three times as long and ask each other then.
    Mates of the last round do not settle: they declare, read and ask, and hear half a trip later that it begins."""
    trip = 0.2

    async with Searchers(0, latency=trip / 2) as swarm:
        peers = [await swarm.add() for _ in range(8)]
        await asyncio.sleep(10)
        for _ in range(3):
            assert await find_all(peers) == [8] * 8
        trips = [[wait / trip for wait in peer.waits] for peer in peers]
        assert max(first for first, *_ in trips) < 9
        assert max(max(later) for _, *later in trips) < 4
