"""Groups of four among eight peers without a common clock: full groups begin, and whoever is left over comes next."""

import asyncio

import pytest

from swarmcli.testing import virtual_time
from tests.averaging.searchers import Searchers
from tests.suites import soak

SIZE = 4
SEEDS = [0, *soak(range(1, 20))]


@pytest.mark.parametrize("seed", SEEDS)
def test_who_is_left_over_has_a_seat_in_the_next_group(seed: int) -> None:
    """Seven look and one holds the bucket: four begin without it, and come back while the other three wait."""

    async def main() -> None:
        async with Searchers(seed, latency=0.02, target_group_size=SIZE) as swarm:
            peers = [await swarm.add() for _ in range(2 * SIZE)]
            await asyncio.sleep(10)
            searches = [asyncio.create_task(peer.keep_searching(lambda: 0.1)) for peer in peers[1:]]
            await asyncio.sleep(4)
            for search in searches:
                search.cancel()
            await asyncio.gather(*searches, return_exceptions=True)
            groups = {group.group_id: group for peer in peers for group in peer.groups}
            assert all(len(group) == SIZE for group in groups.values())
            taken = [len(peer.groups) for peer in peers[1:]]
            assert max(taken) - min(taken) <= 3
            assert max(wait for peer in peers[1:] for wait in peer.waits) < 2.0

    virtual_time.run(main(), seed=seed, timeout=300)


@pytest.mark.soak
@pytest.mark.parametrize("bits", [0, 1])
@pytest.mark.parametrize("seed", SEEDS)
def test_nobody_waits_long_for_a_full_group(seed: int, bits: int) -> None:
    """One begins late, and what the others do between their rounds takes unlike times."""

    async def main() -> tuple[list[float], list[int], list[int]]:
        async with Searchers(seed, latency=0.02, target_group_size=SIZE) as swarm:
            peers = [await swarm.add(initial_group_bits=str(number % 2) * bits) for number in range(2 * SIZE)]
            await asyncio.sleep(10)

            async def come(number: int) -> None:
                await asyncio.sleep(3.0 if number == 0 else 0.1 * number)
                await peers[number].keep_searching(lambda: swarm.random.uniform(0.2, 1.0))

            searches = [asyncio.create_task(come(number)) for number in range(2 * SIZE)]
            await asyncio.sleep(20)
            for search in searches:
                search.cancel()
            await asyncio.gather(*searches, return_exceptions=True)
            waits = sorted(wait for peer in peers for wait in peer.waits)
            return waits, [len(group) for peer in peers for group in peer.groups], [len(peer.groups) for peer in peers]

    waits, sizes, rounds = virtual_time.run(main(), seed=seed, timeout=300)
    assert waits[-1] < 4.0
    assert sizes.count(SIZE) > 0.75 * len(sizes)
    assert min(rounds) > 0.75 * max(rounds)
