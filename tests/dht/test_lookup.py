"""The search as a state machine, compared with what there is, and its driver."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import pytest

from swarmcli.dht.lookup import Lookup, traverse
from swarmcli.dht.records import ID_BITS
from swarmcli.dht.routing import Contact, RoutingTable
from swarmcli.errors import CallTimeout
from swarmcli.network.identity import PeerID
from tests.simulation import simulated

from .swarm import contact

Ask = Callable[[Contact], list[Contact]]


class Network:
    """Routing tables of many nodes that have met at random; some are dead by now."""

    def __init__(self, count: int, dead: float, seed: int) -> None:
        self.random = random.Random(seed)
        self.contacts = [contact(number) for number in range(count)]
        self.dead = {each.peer_id for each in self.contacts if self.random.random() < dead}
        self.tables: dict[PeerID, RoutingTable] = {}
        for each in self.contacts:
            table = self.tables[each.peer_id] = RoutingTable(each.peer_id)
            for other in self.random.sample(self.contacts, count):
                table.seen(other)

    def ask(self, asked: Contact, target: int) -> list[Contact]:
        if asked.peer_id in self.dead:
            raise CallTimeout("dead")
        return self.tables[asked.peer_id].nearest(target, 20)

    def nearest_living(self, target: int, width: int) -> list[Contact]:
        living = [each for each in self.contacts if each.peer_id not in self.dead]
        return sorted(living, key=lambda each: each.node ^ target)[:width]


def drive(lookup: Lookup, ask: Ask, parallel: int, chooser: random.Random, slow: float = 0.0) -> list[Contact]:
    """Answers come in any order; some are overtaken by others."""
    waiting: list[Contact] = []
    for _ in range(10_000):
        for each in lookup.due(parallel):
            lookup.asking(each.peer_id)
            waiting.append(each)
        if lookup.finished:
            return lookup.nearest()
        assert waiting, "a search that is not finished waits for somebody"
        asked = chooser.choice(waiting)
        if chooser.random() < slow:
            lookup.slow(asked.peer_id)
            continue
        waiting.remove(asked)
        try:
            found = ask(asked)
        except CallTimeout:
            lookup.failed(asked.peer_id)
        else:
            lookup.answered(asked.peer_id)
            lookup.offer(found)
    raise AssertionError("the search does not end")


@pytest.mark.parametrize("dead", [0.2, 0.5])
@pytest.mark.parametrize("parallel", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_it_finds_what_there_is(dead: float, parallel: int, seed: int) -> None:
    network = Network(150, dead, seed)
    target = network.random.getrandbits(ID_BITS)
    start = network.random.sample(network.contacts, 12)

    def ask(asked: Contact) -> list[Contact]:
        return network.ask(asked, target)

    lookup = Lookup(target, 5)
    lookup.offer(start)
    found = drive(lookup, ask, parallel, network.random)
    assert found == network.nearest_living(target, 5)


def test_no_more_than_parallel_are_asked_and_slow_ones_do_not_count() -> None:
    lookup = Lookup(0, 5)
    lookup.offer(contact(number) for number in range(10))
    asked = lookup.due(3)
    assert len(asked) == 3
    for each in asked:
        lookup.asking(each.peer_id)
    assert lookup.due(3) == []
    lookup.slow(asked[0].peer_id)
    assert len(lookup.due(3)) == 1
    lookup.answered(asked[0].peer_id)
    lookup.slow(asked[0].peer_id)
    assert asked[0] in lookup.nearest(), "an answer that came is not slow any more"


def lookup(target: int, candidates: int, width: int = 5) -> Lookup:
    made = Lookup(target, width)
    made.offer(contact(number) for number in range(candidates))
    return made


@simulated
async def test_one_message_serves_all_lookups_that_want_the_peer() -> None:
    lookups = [lookup(number << 250, 8) for number in range(20)]
    asked: list[PeerID] = []

    async def ask(asked_one: Contact, asking: Sequence[Lookup]) -> list[Contact]:
        asked.append(asked_one.peer_id)
        await asyncio.sleep(0.1)
        return []

    await traverse(lookups, ask, parallel=5, slow_after=10.0)
    assert all(len(each.nearest()) == 5 for each in lookups)
    assert len(asked) <= 2 * 8


@simulated
async def test_a_silent_peer_costs_the_patience_only_and_its_call_is_cancelled() -> None:
    made = lookup(0, 8)
    silent = made.due(1)[0].peer_id
    cancelled: list[PeerID] = []

    async def ask(asked: Contact, asking: Sequence[Lookup]) -> list[Contact]:
        if asked.peer_id == silent:
            try:
                await asyncio.sleep(1000.0)
            except asyncio.CancelledError:
                cancelled.append(asked.peer_id)
                raise
        return []

    await traverse([made], ask, parallel=5, slow_after=0.5)
    assert asyncio.get_running_loop().time() == pytest.approx(0.5)
    assert cancelled == [silent]
    assert len(made.nearest()) == 5
