"""The search as a state machine, compared with the slow and obvious one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from swarmcli.dht.lookup import Lookup
from swarmcli.dht.records import ID_BITS
from swarmcli.dht.routing import Contact, RoutingTable
from swarmcli.errors import CallTimeout
from swarmcli.network.identity import PeerID

Ask = Callable[[Contact], list[Contact]]


def contact(number: int) -> Contact:
    return Contact(PeerID(number.to_bytes(32, "big")), (f"memory://{number}",))


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


def test_it_waits_for_the_slow_when_there_is_nobody_else() -> None:
    lookup = Lookup(0, 5)
    lookup.offer([contact(1)])
    (only,) = lookup.due(3)
    lookup.asking(only.peer_id)
    lookup.slow(only.peer_id)
    assert lookup.due(3) == [] and not lookup.finished
    lookup.answered(only.peer_id)
    assert lookup.due(3) == [] and lookup.finished and lookup.nearest() == [only]
