"""Whoever names contacts that are not there pays for it, and is forgiven in time."""

from __future__ import annotations

import random

import pytest

from swarmcli.dht.lookup import Hearsay, Lookup
from swarmcli.dht.routing import Contact, spread
from swarmcli.network.identity import PeerID
from swarmcli.network.prefix import Prefix, prefix_of_address

from .swarm import contact


def near(target: int, count: int, seed: int = 0) -> list[Contact]:
    """Contacts with ids as near to the target as nobody's: what a liar invents."""
    dice = random.Random(seed)
    drawn = [Contact(PeerID(dice.randbytes(32)), (f"memory://{n}",)) for n in range(50 * count)]
    return sorted(drawn, key=lambda each: each.node ^ target)[:count]


def test_invented_contacts_cost_a_search_four_dials_of_each_liar_and_the_next_one_fewer() -> None:
    liar, honest, target = contact(0), contact(1), 0
    hearsay = Hearsay()
    asked = []
    for search in range(2):
        lookup = Lookup(target, 5, hearsay=hearsay)
        lookup.offer([liar, honest])
        for teller, named in ((liar, near(target, 20, search)), (honest, [contact(n) for n in range(2, 12)])):
            lookup.asking(teller.peer_id)
            lookup.answered(teller.peer_id)
            lookup.offer(named, teller.peer_id)
        invented = 0
        while due := lookup.due(3):
            for each in due:
                lookup.asking(each.peer_id)
                if lookup.namer(each.peer_id) == liar.peer_id:
                    invented += 1
                    lookup.failed(each.peer_id)
                    hearsay.missed({liar.peer_id}, 0.0)
                else:
                    lookup.answered(each.peer_id)
        assert lookup.finished and len(lookup.nearest()) == 5
        asked.append(invented)
    assert asked[0] <= 4 + 2 and asked[1] <= 1 + 2, "two more may be under way when the credit is used up"


def test_paths_ask_nobody_twice_and_a_liar_spoils_its_own() -> None:
    """Three nodes are known; one names liars only, who answer and name each other. The search finds the honest ones."""
    dice, target = random.Random(5), 1 << 255
    everyone = [contact(number) for number in range(100, 400)]
    liars = set(near_of(everyone, target, 40)[3::2])
    honest = [each for each in everyone if each not in liars]
    lookup = Lookup(target, 5, paths=3)
    start = [near_of(sorted(liars, key=lambda each: each.node ^ target), target, 1)[0], *dice.sample(honest, 2)]
    lookup.offer(start)
    asked: list[PeerID] = []
    while due := lookup.due(3):
        for each in due:
            asked.append(each.peer_id)
            lookup.asking(each.peer_id)
            lookup.answered(each.peer_id)
            known = liars if each in liars else everyone
            lookup.offer(near_of(known, target, 8), each.peer_id)
    assert len(asked) == len(set(asked))
    assert lookup.nearest() == near_of(everyone, target, 5)


def near_of(contacts: object, target: int, count: int) -> list[Contact]:
    return sorted(contacts, key=lambda each: each.node ^ target)[:count]  # type: ignore[call-overload]


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
