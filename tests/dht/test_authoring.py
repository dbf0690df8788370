"""Numbers and expirations of one's own records."""

from __future__ import annotations

from swarmcli.dht.limits import DHTLimits
from swarmcli.dht.records import TOMBSTONE, Author, OwnedSubkey
from swarmcli.dht.schema import SignatureValidator
from swarmcli.network.identity import Identity

OWNER = Identity.from_seed(b"author")
MINE = OwnedSubkey(OWNER.peer_id)


def test_numbers_only_rise_even_if_the_clock_does_not() -> None:
    author = Author(OWNER, DHTLimits())
    numbers = [author.write("key", MINE, 1, 2000.0, now).sequence for now in (1000.0, 1000.0, 500.0, 1001.0)]
    assert numbers == [1_000_000, 1_000_001, 1_000_002, 1_001_000]


def test_a_tombstone_outlives_everything_it_withdraws() -> None:
    author = Author(OWNER, DHTLimits())
    long = author.write("key", MINE, 1, 9000.0, now=1000.0)
    author.write("key", MINE, 2, 1100.0, now=1000.0)
    tombstone = author.withdraw("key", MINE, None, now=1010.0)
    assert tombstone.value == TOMBSTONE and tombstone.expiration == long.expiration
    SignatureValidator().validate(tombstone)
    unknown = Author(OWNER, DHTLimits()).withdraw("key", MINE, None, now=1000.0)
    assert unknown.expiration == 1060.0
    found = Author(OWNER, DHTLimits()).withdraw("key", MINE, long, now=1000.0)
    assert found.expiration == 9000.0 and found.sequence > long.sequence
