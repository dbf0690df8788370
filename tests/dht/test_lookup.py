"""The search, compared with what there is; what liars cost it; and messages that serve several searches."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from swarmcli.dht.lookup import MOST_MISSED, search
from swarmcli.dht.records import ID_BITS
from swarmcli.dht.routing import Contact, RoutingTable, spread
from swarmcli.errors import CallTimeout
from swarmcli.network.identity import PeerID
from swarmcli.network.prefix import Prefix, prefix_of_address
from tests.simulation import simulated

from .swarm import contact


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

    async def ask(self, asked: Contact, target: int) -> list[Contact]:
        await asyncio.sleep(self.random.choice([0.1, 0.3, 0.45]))
        if asked.peer_id in self.dead:
            raise CallTimeout("dead")
        return self.tables[asked.peer_id].nearest(target, 20)


def nearest(contacts: Sequence[Contact] | set[Contact], target: int, count: int) -> list[Contact]:
    return sorted(contacts, key=lambda each: each.node ^ target)[:count]


@pytest.mark.parametrize("dead", [0.2, 0.5])
@pytest.mark.parametrize("parallel", [1, 3])
@pytest.mark.parametrize("seed", range(3))
@simulated
async def test_it_finds_what_there_is(dead: float, parallel: int, seed: int) -> None:
    network = Network(150, dead, seed)
    target = network.random.getrandbits(ID_BITS)
    start = network.random.sample(network.contacts, 12)
    found = await search(
        target, start, lambda each: network.ask(each, target), width=5, parallel=parallel, slow_after=0.5
    )
    assert found == nearest([each for each in network.contacts if each.peer_id not in network.dead], target, 5)


@simulated
async def test_no_more_than_parallel_are_asked_and_slow_ones_do_not_count() -> None:
    waiting, most = 0, 0

    async def ask(asked: Contact) -> list[Contact]:
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        await asyncio.sleep(0.1)
        waiting -= 1
        return []

    assert len(await search(0, map(contact, range(10)), ask, width=5, parallel=3, slow_after=10)) == 5
    assert most == 3


@simulated
async def test_a_silent_peer_costs_the_patience_only_and_its_call_is_cancelled() -> None:
    contacts = [contact(number) for number in range(8)]
    silent = nearest(contacts, 0, 1)[0]
    cancelled: list[Contact] = []

    async def ask(asked: Contact) -> list[Contact]:
        if asked == silent:
            try:
                await asyncio.sleep(1000.0)
            except asyncio.CancelledError:
                cancelled.append(asked)
                raise
        return []

    found = await search(0, contacts, ask, width=5, parallel=5, slow_after=0.5)
    assert asyncio.get_running_loop().time() == pytest.approx(0.5)
    assert cancelled == [silent] and found == nearest(contacts, 0, 6)[1:]


@pytest.mark.parametrize("silent", [False, True])
@simulated
async def test_invented_contacts_cost_a_search_few_dials_of_each_liar(silent: bool) -> None:
    dice = random.Random(1)
    drawn = [Contact(PeerID(dice.randbytes(32)), (f"memory://{number}",)) for number in range(1000)]
    liar, honest, invented = contact(0), contact(1), nearest(drawn, 0, 20)
    dialed = 0

    async def ask(asked: Contact) -> list[Contact]:
        nonlocal dialed
        if asked in invented:
            dialed += 1
            await asyncio.sleep(4.0 if silent else 0.1)
            raise CallTimeout("nobody is there")
        await asyncio.sleep(0.1)
        return invented if asked == liar else [contact(number) for number in range(2, 12)] if asked == honest else []

    assert len(await search(0, [liar, honest], ask, width=5, parallel=3, slow_after=0.5)) == 5
    assert 0 < dialed <= MOST_MISSED + 3
    assert asyncio.get_running_loop().time() < 4.0


@simulated
async def test_an_honest_peer_half_of_whose_contacts_are_gone_is_believed() -> None:
    named = nearest([contact(number) for number in range(1, 25)], 0, 24)
    gone = named[1::2]

    async def ask(asked: Contact) -> list[Contact]:
        await asyncio.sleep(0.1)
        if asked in gone:
            raise CallTimeout("nobody is there")
        return named if asked == contact(0) else []

    found = await search(0, [contact(0)], ask, width=20, parallel=3, slow_after=0.5)
    assert set(found) == {contact(0), *named} - set(gone)


@simulated
async def test_paths_ask_nobody_twice_and_a_liar_spoils_its_own() -> None:
    """Three nodes are known; one names liars only, who answer and name each other. The search finds the honest ones."""
    dice, target = random.Random(5), 1 << 255
    everyone = [contact(number) for number in range(100, 400)]
    liars = set(nearest(everyone, target, 40)[3::2])
    start = [*nearest(liars, target, 1), *dice.sample([each for each in everyone if each not in liars], 2)]
    asked: list[Contact] = []

    async def ask(each: Contact) -> list[Contact]:
        asked.append(each)
        await asyncio.sleep(0.1)
        return nearest(liars if each in liars else everyone, target, 8)

    found = await search(target, start, ask, width=5, paths=3, parallel=3, slow_after=1.0)
    assert found == nearest(everyone, target, 5) and len(asked) == len(set(asked))


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("abcdefg", "abcde"),
        ("aaabcde", "abcde"),
        ("aaaaaaa", "aaaaa"),
        ("aaaaaab", "aaaab"),
        ("LLLLLab", "LLLLL"),  # a network that strangers share
    ],
)
def test_replicas_are_in_unlike_networks_as_long_as_there_are_others(hosts: str, expected: str) -> None:
    def prefix(contact: tuple[str, int]) -> Prefix | None:
        return None if contact[0] == "L" else prefix_of_address(f"memory://{contact[0]}")

    contacts = [(host, place) for place, host in enumerate(hosts)]
    assert "".join(host for host, _ in spread(contacts, 5, prefix)) == expected
