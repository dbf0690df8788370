"""Finding a group, simulated under virtual time with more seeds than the tests take: figures for NOTES.md.

    python -m benchmarks.matchmaking [seeds]

Round trips are those of the simulated network; nothing here measures this machine.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from swarmcli.testing import virtual_time
from tests.averaging.find.test_churn import churn
from tests.averaging.find.test_moshpit import mix
from tests.averaging.searchers import Searcher, Searchers

SEEDS = 3
TRIP = 0.1  # seconds
CHURN_SECONDS = 60.0


Crowd: TypeAlias = tuple[list[int], list[float], float]  # sizes of groups, waits of those in one, calls of each peer


def spread_of(times: Iterable[float]) -> str:
    """Median, 99th percentile and maximum, in seconds."""
    ordered = sorted(times)
    return f"{statistics.median(ordered):.2f} / {ordered[len(ordered) * 99 // 100]:.2f} / {ordered[-1]:.2f} s"


async def crowd(
    seed: int, count: int, size: int | None, spread: float, deaths: int
) -> tuple[list[int], list[float], float]:
    """The sizes of the groups, how long each peer waited (of those that found one), and calls for each peer."""
    async with Searchers(seed, latency=TRIP / 10, target_group_size=size) as swarm:
        peers = [await swarm.add() for _ in range(count)]
        await asyncio.sleep(10)
        before = sum(peer.node.endpoint.statistics().calls_made for peer in peers)

        async def find(peer: Searcher) -> None:
            await asyncio.sleep(swarm.random.uniform(0, spread))
            await peer.find(timeout=12.0)

        searches = {peer: asyncio.ensure_future(find(peer)) for peer in peers}
        dead = swarm.random.sample(peers, deaths)
        for peer in dead:
            asyncio.get_running_loop().call_later(swarm.random.uniform(0, 1), swarm.network.freeze, peer.peer_id)
        await asyncio.gather(*(search for peer, search in searches.items() if peer not in dead))
        calls = sum(peer.node.endpoint.statistics().calls_made for peer in peers) - before
        for peer in dead:
            searches[peer].cancel()
            swarm.network.thaw(peer.peer_id)
        groups = {group.group_id: len(group) for peer in peers for group in peer.groups}
        return sorted(groups.values()), [peer.waits[0] for peer in peers if peer.waits], calls / count


def report_crowds(seeds: Sequence[int]) -> None:
    print("peers size start-within freeze | groups left-over | wait: median / p99 / max | calls per peer")
    for count, size, spread, deaths in (
        (64, None, 0.3, 0),
        (64, 16, 0.3, 0),
        (64, 16, 2.0, 0),
        (64, 16, 5.0, 0),
        (64, 16, 0.3, 3),
        (17, 16, 0.3, 0),
    ):
        runs = [virtual_time.run(crowd(seed, count, size, spread, deaths), seed=seed, timeout=3600) for seed in seeds]
        groups = sorted(len(sizes) for sizes, _, _ in runs)
        waits = spread_of(wait for _, waits, _ in runs for wait in waits)
        left = sum(count - deaths - len(waits) for _, waits, _ in runs) / len(runs)
        print(f"{count:5} {size!s:>4} {spread:5.1f} s {deaths:4} | {groups[0]}-{groups[-1]} {left:.2f}", end="")
        print(f" | {waits} | {statistics.fmean(calls for _, _, calls in runs):.1f}")


def report_mixing(seeds: Sequence[int], count: int = 64, size: int = 8, rounds: int = 2) -> None:
    """Over the hash table, with messages: this takes minutes."""
    print(f"variance left after each round of {count} peers in groups of {size}; in brackets ((r - 1)/(N - 1))^T")
    for seed in seeds:
        left = virtual_time.run(mix(seed, count, size, rounds), seed=seed, timeout=3600)
        print(f"seed {seed}: " + ", ".join(f"{measured:.1e} ({expected:.1e})" for measured, expected in left))


def report_trips() -> None:
    async def main(count: int) -> None:
        async with Searchers(0, latency=TRIP / 2) as swarm:
            peers = [await swarm.add() for _ in range(count)]
            await asyncio.sleep(10)
            for _ in range(2):
                await asyncio.gather(*(peer.find() for peer in peers))
            first, again = (max(peer.waits[turn] for peer in peers) / TRIP for turn in range(2))
            print(f"{count:3} peers: strangers {first:.1f} round trips, mates of the last round {again:.1f}")

    for count in (2, 4, 8, 32):
        virtual_time.run(main(count), seed=0, timeout=3600)


def report_churn(seeds: Sequence[int]) -> None:
    async def main(seed: int) -> None:
        async with Searchers(seed) as swarm:
            await churn(swarm, 64, CHURN_SECONDS, 0.2)
            waits = [wait for peer in swarm.peers for wait in peer.waits]
            failed = sum(len(peer.failures) for peer in swarm.peers)
            sizes = [len(group) for peer in swarm.peers for group in peer.groups]
            formed = 100 * len(waits) / (len(waits) + failed)
            print(f"seed {seed}: {formed:.2f}% of {len(waits) + failed} formed, wait {spread_of(waits)}", end="")
            print(f", median size {statistics.median(sizes):.0f}, {len(swarm.gone)} left meanwhile")

    print("64 peers, a fifth leaving and a fifth joining per minute, for a minute")
    for seed in seeds:
        virtual_time.run(main(seed), seed=seed, timeout=3600)


def main(seeds: int = SEEDS) -> None:
    report_trips()
    report_crowds(range(seeds))
    report_mixing(range(1))
    report_churn(range(seeds))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
