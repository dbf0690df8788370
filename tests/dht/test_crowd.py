"""What a hostile third of the nodes hides, and what identities hide that were made up to surround a key."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from swarmcli.dht.records import key_id, node_id
from swarmcli.network.identity import Identity, PeerID
from tests.simulation import simulated
from tests.suites import soak

from .crowd import Crowd, calls, share_found


async def third(count: int, reads: int, seed: int, invented: int) -> tuple[float, float]:
    """Of reads beside a hostile third, the share that finds the record; and calls per search of honest nodes."""
    crowd = Crowd(count, seed)
    drawn = crowd.random.sample(crowd.cores, count)
    liars, honest = drawn[: count // 3], drawn[count // 3 :]
    crowd.corrupt(liars, invented)
    found = await share_found(crowd, honest, reads)
    per_search = calls(honest) / (2 * reads)
    print(
        f"{count} nodes, a third hostile, {invented} invented contacts an answer: "
        f"{found:.1%} of {reads} reads found the record, {per_search:.1f} calls a search"
    )
    return found, per_search


@pytest.mark.parametrize("invented", [8, *soak([0])])
@simulated
async def test_a_hostile_third_hides_hardly_anything(invented: int) -> None:
    found, per_search = await third(120, 40, 1, invented)
    assert found >= 0.95 and per_search < 40


@pytest.mark.soak
@pytest.mark.parametrize("invented", [0, 8])
@pytest.mark.parametrize("seed", range(2))
@simulated
async def test_of_a_thousand_nodes_a_hostile_third_hides_less_than_one_read_in_a_hundred(
    seed: int, invented: int
) -> None:
    found, per_search = await third(1000, 1000, seed, invented)
    assert found >= 0.99 and per_search < 60


def ground(target: int, count: int, tries: int) -> list[PeerID]:
    """The nearest of so many ids. In the simulation nobody needs their keys."""
    drawn = (PeerID(number.to_bytes(32, "big")) for number in range(tries))
    return sorted(drawn, key=lambda peer: node_id(peer) ^ target)[:count]


async def surrounded(count: int, identities: int, host: Callable[[int], str], *, seed: int = 1) -> float:
    """Of reads of one key with so many ground identities around it, the share that finds the record."""
    around = ground(key_id("key 0"), identities, 20 * count * identities)
    crowd = Crowd(count, seed, more=around, host=host)
    honest, liars = crowd.cores[:count], crowd.cores[count:]
    crowd.corrupt(liars)
    return await share_found(crowd, honest, 20, per_key=20)


def networks(count: int) -> Callable[[int], str]:
    return lambda number: f"250.{number % count}.1.{number % 250}"


@simulated
async def test_identities_of_one_network_around_a_key_hold_one_of_its_replicas() -> None:
    assert await surrounded(60, 40, networks(1)) == 1.0


@pytest.mark.soak
@simulated
async def test_what_it_takes_to_surround_a_key() -> None:
    """Measured, not prevented: identities cost nothing. docs/security.md tells the figures."""
    began = time.perf_counter()
    for number in range(20_000):
        node_id(Identity.from_seed(number).peer_id)
    rate = 20_000 / (time.perf_counter() - began)
    nodes = 300
    print(f"{rate:.0f} identities a second on one core; one in {nodes} is nearer to a key than all of {nodes} nodes")
    for identities, prefixes in ((5, 1), (40, 1), (40, 2), (40, 4), (5, 5), (10, 5), (40, 5), (40, 8), (40, 40)):
        found = await surrounded(nodes, identities, networks(prefixes))
        seconds = identities * nodes / rate
        print(
            f"{identities} identities in {prefixes} networks, ground in {seconds:.1f} s: {found:.0%} of reads find it"
        )
        assert found == 1.0 or prefixes >= 5
