"""The search as a state machine, compared with the slow and obvious one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from swarmcli.dht.lookup import Lookup, traverse
from swarmcli.dht.records import ID_BITS
from swarmcli.dht.routing import Contact, RoutingTable
from swarmcli.errors import CallTimeout, NetworkError
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


def reference_lookup(
    target: int, width: int, start: Iterable[Contact], ask: Callable[[Contact], Iterable[Contact]]
) -> list[Contact]:
    """Asks one after the other, always the nearest not asked yet, until the nearest `width` have all answered.

    `ask` raises NetworkError for a peer that does not answer. Slow and obvious: the measure for `Lookup`.
    """
    candidates = {contact.peer_id: contact for contact in start}
    answered: set[PeerID] = set()
    dead: set[PeerID] = set()
    while True:
        alive = (contact for contact in candidates.values() if contact.peer_id not in dead)
        nearest = sorted(alive, key=lambda contact: contact.node ^ target)[:width]
        unasked = [contact for contact in nearest if contact.peer_id not in answered]
        if not unasked:
            return nearest
        try:
            found = ask(unasked[0])
        except NetworkError:
            dead.add(unasked[0].peer_id)
            continue
        answered.add(unasked[0].peer_id)
        candidates.update({other.peer_id: other for other in found})


@pytest.mark.parametrize("dead", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("parallel", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_it_finds_what_the_reference_finds_and_what_there_is(dead: float, parallel: int, seed: int) -> None:
    network = Network(150, dead, seed)
    target = network.random.getrandbits(ID_BITS)
    start = network.random.sample(network.contacts, 12)

    def ask(asked: Contact) -> list[Contact]:
        return network.ask(asked, target)

    lookup = Lookup(target, 5)
    lookup.offer(start)
    found = drive(lookup, ask, parallel, network.random)
    assert found == reference_lookup(target, 5, start, ask) == network.nearest_living(target, 5)


@pytest.mark.parametrize("seed", range(6))
def test_slow_answers_cost_nothing_but_do_not_stop_it(seed: int) -> None:
    """Whoever is slow may be missing from the result; everyone in it is nearer than all others that answered."""
    network = Network(100, 0.2, seed)
    target = network.random.getrandbits(ID_BITS)
    lookup = Lookup(target, 5)
    lookup.offer(network.random.sample(network.contacts, 12))
    found = drive(lookup, lambda asked: network.ask(asked, target), 3, network.random, slow=0.3)
    assert len(found) == 5
    assert len({each.peer_id for each in found} & {each.peer_id for each in network.nearest_living(target, 8)}) >= 3


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


def test_without_candidates_it_ends_with_nothing() -> None:
    lookup = Lookup(0, 5)
    assert lookup.due(3) == [] and lookup.finished and lookup.nearest() == []


def test_liars_who_invent_nearer_nodes_do_not_lead_it_on_for_ever() -> None:
    invented = iter(range(1000, 10**6))

    def ask(asked: Contact) -> list[Contact]:
        return [contact(next(invented)) for _ in range(20)]

    lookup = Lookup(0, 5)
    lookup.offer([contact(1)])
    asked = 0

    def counted(each: Contact) -> list[Contact]:
        nonlocal asked
        asked += 1
        if asked % 2:
            raise CallTimeout("invented")
        return ask(each)

    lookup.offer(ask(contact(1)))
    drive(lookup, counted, 3, random.Random(1))
    assert asked <= 170


def test_a_stopped_search_asks_nobody_and_a_reopened_one_goes_on() -> None:
    lookup = Lookup(0, 2)
    lookup.offer(contact(number) for number in range(4))
    first, second = lookup.due(3)
    for each in (first, second):
        lookup.asking(each.peer_id)
        lookup.answered(each.peer_id)
    assert lookup.due(3) == [] and lookup.finished
    lookup.failed(second.peer_id)
    lookup.finished = False
    (third,) = lookup.due(3)
    assert lookup.wants(third.peer_id)
    lookup.finished = True
    assert not lookup.wants(third.peer_id) and lookup.due(3) == []


def test_a_search_that_is_cancelled_as_calls_become_overdue_asks_nobody_more() -> None:
    """On a busy machine both come in one turn of the loop; each such call ended as an error of the loop."""
    errors = list[dict[str, Any]]()

    async def main() -> None:
        lookup, loop = Lookup(0, 8), asyncio.get_running_loop()
        lookup.offer([contact(number) for number in range(20)])
        loop.set_exception_handler(lambda _, context: errors.append(context))

        async def ask(whom: Contact, lookups: Sequence[Lookup]) -> list[Contact]:
            await asyncio.Event().wait()
            return []

        searching = asyncio.create_task(traverse([lookup], ask, parallel=3, slow_after=1.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        searching.cancel()
        now = loop.time() + 1.0
        loop.time = lambda: now  # type: ignore[method-assign]  # the machine was busy for a second
        await asyncio.wait([searching])
        assert searching.cancelled()

    asyncio.run(main())
    assert not errors
