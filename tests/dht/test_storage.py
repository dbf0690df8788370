"""What a node keeps: newest record wins, bounds hold, expired records vanish, followers read only changes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmcli.dht.bounds import DHTLimits
from swarmcli.dht.records import (
    OwnedSubkey,
    Record,
    Subkey,
    encode_subkey,
    encode_value,
    key_id,
    merge_record,
)
from swarmcli.dht.storage import Storage, StoreVerdict
from swarmcli.network.identity import Identity


def record(
    key: str = "key", subkey: Subkey = None, value: object = 1, expiration: float = 100.0, **more: Any
) -> Record:
    return Record(key, encode_subkey(subkey), encode_value(value), expiration, **more)


def owned(seed: int, **more: Any) -> Record:
    return record(subkey=OwnedSubkey(Identity.from_seed(seed).peer_id), sequence=1, signature=b"s" * 64, **more)


records = st.builds(
    record,
    key=st.sampled_from(["one", "two"]),
    subkey=st.sampled_from([None, "a", "b"]),
    value=st.integers(0, 2),
    expiration=st.sampled_from([5.0, 10.0, 20.0]),
    sequence=st.integers(0, 2),
)


@settings(max_examples=30)
@given(st.lists(records, max_size=12), st.lists(st.booleans(), min_size=12, max_size=12))
def test_changes_since_a_cursor_make_up_the_whole(them: list[Record], reads: list[bool]) -> None:
    """A reader who now and then reads changes ends with what the storage holds."""
    storage, seen, cursor = Storage(DHTLimits()), {}, 0
    for each, read in zip(them, reads, strict=False):
        storage.put(each, now=0.0)
        entry = storage.entry(key_id("one"), 0.0)
        if read and entry is not None:
            changes = entry.since(cursor)
            assert [stored.version for stored in changes] == sorted(stored.version for stored in changes)
            assert all(stored.version > cursor for stored in changes)
            for stored in changes:
                merge_record(seen, stored.record)
            cursor = storage.version
    entry = storage.entry(key_id("one"), 0.0)
    if entry is not None:
        for stored in entry.since(cursor):
            merge_record(seen, stored.record)
        assert seen == {name: stored.record for name, stored in entry.records.items()}


def test_expired_records_vanish_with_their_keys() -> None:
    storage = Storage(DHTLimits())
    storage.put(record(subkey="short", expiration=10.0), now=0.0)
    storage.put(record(subkey="long", expiration=20.0), now=0.0)
    storage.put(record(key="other", expiration=10.0), now=0.0)
    entry = storage.entry(key_id("key"), now=10.0)
    assert entry is not None and list(entry.records) == [encode_subkey("long")]
    assert storage.keys(now=10.0) == [key_id("key")]
    assert storage.keys(now=20.0) == [] and storage.size == 0 and storage.count() == 0
    storage.put(record(expiration=20.0), now=20.0)
    assert storage.count() == 0


def test_subkeys_of_a_key_are_bounded_and_owned_ones_come_first() -> None:
    storage = Storage(DHTLimits(max_subkeys=3))
    for name, expiration in (("a", 30.0), ("b", 10.0), ("c", 20.0)):
        assert storage.put(record(subkey=name, expiration=expiration), now=0.0) is StoreVerdict.STORED
    assert storage.put(record(subkey="d"), now=0.0) is StoreVerdict.FULL
    assert storage.put(record(subkey="a", expiration=40.0), now=0.0) is StoreVerdict.STORED, "a newer one needs no room"
    assert storage.put(owned(1), now=0.0) is StoreVerdict.STORED
    entry = storage.entry(key_id("key"), 0.0)
    assert entry is not None and encode_subkey("c") not in entry.records, "the one that came last made room"
    for seed in (2, 3):
        assert storage.put(owned(seed), now=0.0) is StoreVerdict.STORED
    assert storage.put(owned(4), now=0.0) is StoreVerdict.FULL, "nobody makes room for those whom somebody owns"


@pytest.mark.parametrize("bound", ["max_storage", "max_entry"])
def test_bytes_are_bounded(bound: str) -> None:
    storage = Storage(DHTLimits(**{bound: 2100}))
    verdicts = [storage.put(record(subkey=n, value="x" * 500), now=0.0) for n in range(5)]
    assert verdicts == [StoreVerdict.STORED] * 3 + [StoreVerdict.FULL] * 2
    assert storage.size <= 2100
    assert storage.put(record(subkey=0, value="x" * 2000, expiration=200.0), now=0.0) is StoreVerdict.FULL
    assert storage.put(record(subkey=0, value="x", expiration=200.0), now=0.0) is StoreVerdict.STORED
    assert storage.put(record(subkey=4, value="x" * 500), now=0.0) is StoreVerdict.STORED
    other = storage.put(record(key="other", value="x" * 500), now=0.0)
    assert other is (StoreVerdict.FULL if bound == "max_storage" else StoreVerdict.STORED)


def test_records_that_a_stranger_makes_up_do_not_hide_an_honest_one() -> None:
    """Of 65 hashes of 64 bits some make up a given number, bit by bit without carry."""
    storage, honest = Storage(DHTLimits()), owned(1)
    storage.put(record(), now=0.0)
    before = storage.entry(key_id("key"), 0.0)
    assert before is not None
    digest, missing, chosen = before.digest(), honest.fingerprint(), 0
    made_up = [record(subkey=str(number)) for number in range(100)]
    rows: list[tuple[int, int]] = []  # a sum of fingerprints, and of which: one for each highest bit
    for total, which in [*((each.fingerprint(), 1 << number) for number, each in enumerate(made_up)), (missing, 0)]:
        for row, of in sorted(rows, reverse=True):
            total, which = min((total, which), (total ^ row, which ^ of))
        rows.append((total, which))
        chosen = which
    assert rows[-1][0] == 0
    for each in [honest, *(each for number, each in enumerate(made_up) if chosen >> number & 1)]:
        assert storage.put(each, now=0.0) is StoreVerdict.STORED
    after = storage.entry(key_id("key"), 0.0)
    assert after is not None and after.digest() != digest
