"""The routing table, compared with sorting everything; lost contacts, and banned ones."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from swarmcli.dht import routing
from swarmcli.dht.records import ID_BITS, node_id
from swarmcli.dht.routing import Contact, Contacts, RoutingTable

from .swarm import contact


def filled(count: int, bucket_size: int = 20, own: int = 10**6) -> RoutingTable:
    table = RoutingTable(contact(own).peer_id, bucket_size)
    for number in range(count):
        table.seen(contact(number))
    return table


@pytest.mark.parametrize("count", [0, 1, 5, 60, 600])
@pytest.mark.parametrize("seed", range(5))
def test_nearest_is_what_sorting_everything_gives(count: int, seed: int) -> None:
    table = filled(count)
    target = random.Random(seed).getrandbits(ID_BITS)
    expected = sorted(table, key=lambda each: each.node ^ target)
    for wanted in (1, 5, 20, 1000):
        assert table.nearest(target, wanted) == expected[:wanted]


def test_a_full_bucket_keeps_the_old_and_names_whom_to_ping() -> None:
    table = filled(1000, bucket_size=3)
    far = [each for each in table if (each.node ^ node_id(contact(10**6).peer_id)).bit_length() == ID_BITS]
    oldest = far[0]
    newcomers = [n for n in range(1000, 1100) if _bucket(contact(n)) == ID_BITS]
    assert table.seen(contact(newcomers[0])) == (False, oldest)
    table.seen(oldest)  # it has answered
    assert table.seen(contact(newcomers[1])) == (False, far[1])
    assert oldest.peer_id in table


def test_who_fails_is_replaced_by_the_newcomer_seen_last() -> None:
    table = filled(0, bucket_size=2)
    members = [contact(n) for n in range(100) if _bucket(contact(n)) == ID_BITS][:4]
    for each in members:
        table.seen(each)
    assert list(table) == members[:2]
    assert table.failed(members[0].peer_id) == (members[0], members[3])
    assert set(table) == {members[1], members[3]} and len(table) == 2
    assert table.failed(members[0].peer_id) == (None, None)
    assert table.failed(members[3].peer_id) == (members[3], members[2])
    assert table.failed(members[2].peer_id) == (members[2], None)
    assert table.failed(members[1].peer_id) == (members[1], None)
    assert len(table) == 0 == len(list(table)) and table.nearest(0, 5) == []


def _bucket(each: Contact) -> int:
    return (each.node ^ node_id(contact(10**6).peer_id)).bit_length()


Heard = list[tuple[str, Contact]]


def made(bucket_size: int = 20) -> tuple[Contacts, Heard]:
    """Contacts, with a list of the changes that they told of."""
    heard: Heard = []
    own = contact(0).peer_id
    contacts = Contacts(own, bucket_size)
    contacts.listeners.append(lambda change, contact: heard.append((change, contact)))
    return contacts, heard


def test_lost_contacts_are_probed_ever_less_often_until_they_are_heard_from() -> None:
    contacts, _ = made()
    contacts.heard_from(contact(1), 0.0)
    assert contacts.next_probe() == math.inf
    contacts.gone(contact(1).peer_id, now=0.0)
    times = []
    for _ in range(12):
        due = contacts.next_probe()
        assert contacts.lost_contacts(due - 0.1, 4) == [] and contacts.lost_contacts(due, 4) == [contact(1)]
        times.append(due)
        contacts.gone(contact(1).peer_id, now=due)
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert pauses[:3] == [8.0, 32.0, 128.0] and pauses[-1] == 600.0
    assert contacts.last_resort(5) == [contact(1)]
    contacts.heard_from(contact(1), 0.0)
    assert contacts.next_probe() == math.inf and contacts.last_resort(5) == []


def test_the_banned_are_not_taken_in_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MOST_LOST", 2)
    contacts, heard = made()
    peer = contact(1).peer_id
    contacts.heard_from(contact(1), 0.0)
    contacts.ban(peer, now=0.0)
    contacts.heard_from(contact(1), 0.0)
    assert peer not in contacts.table and contacts.is_banned(peer, now=299.0) and contacts.next_probe() == math.inf
    contacts.heard_from(contact(1), 300.0)
    assert peer in contacts.table
    assert [what for what, _ in heard] == ["appeared", "lost", "appeared"]
    for number in range(2, 5):
        contacts.ban(contact(number).peer_id, now=0.0)
    assert not contacts.is_banned(contact(2).peer_id, now=0.0) and contacts.is_banned(contact(4).peer_id, now=0.0)
