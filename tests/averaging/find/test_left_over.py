"""Groups of four among eight peers without a common clock: full groups begin, and whoever is left over comes next."""

import asyncio

import pytest

from tests.averaging.searchers import Searchers
from tests.simulation import within
from tests.suites import soak

SIZE = 4
SEEDS = [0, *soak(range(1, 20))]


@pytest.mark.parametrize("seed", SEEDS)
@within(300)
async def test_who_is_left_over_has_a_seat_in_the_next_group(seed: int) -> None:
    """Seven look and one holds the bucket: four begin without it, and come back while the other three wait."""
    async with Searchers(seed, latency=0.02, target_group_size=SIZE) as swarm:
        peers = [await swarm.add() for _ in range(2 * SIZE)]
        await asyncio.sleep(10)
        searches = [asyncio.create_task(peer.keep_searching(lambda: 0.1)) for peer in peers[1:]]
        await asyncio.sleep(4)
        for search in searches:
            search.cancel()
        await asyncio.gather(*searches, return_exceptions=True)
        groups = {group.group_id: group for peer in peers for group in peer.groups}
        assert all(len(group) in (SIZE - 1, SIZE) for group in groups.values()), "in even shares"
        taken = [len(peer.groups) for peer in peers[1:]]
        assert max(taken) - min(taken) <= 3
        assert max(wait for peer in peers[1:] for wait in peer.waits) < 1.0
