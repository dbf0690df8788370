"""Who is known, who was lost, and who is not listened to."""

from __future__ import annotations

import itertools
import math

from swarmcli.dht.limits import DHTLimits
from swarmcli.dht.routing import Contact, Contacts
from swarmcli.network.identity import PeerID


def contact(number: int) -> Contact:
    return Contact(PeerID(number.to_bytes(32, "big")), (f"memory://{number}",))


Heard = list[tuple[str, Contact]]


def made(bucket_size: int = 20, **limits: int) -> tuple[Contacts, Heard]:
    """Contacts, with a list of the changes that they told of."""
    heard: Heard = []
    own = contact(0).peer_id
    contacts = Contacts(own, bucket_size, DHTLimits(**limits))
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


def test_the_banned_are_not_taken_in_for_a_while() -> None:
    contacts, heard = made(max_evicted=2)
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
