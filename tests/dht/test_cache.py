"""What was read lately."""

from __future__ import annotations

from swarmcli.dht.limits import DHTLimits
from swarmcli.dht.records import Record, encode_subkey, encode_value
from swarmcli.dht.storage import ReadCache


def record(subkey: str, expiration: float = 100.0, value: object = 1) -> Record:
    return Record("key", encode_subkey(subkey), encode_value(value), expiration)


def held(*records: Record) -> dict[bytes, Record]:
    return {each.subkey: each for each in records}


def test_it_forgets_with_age_and_expiration() -> None:
    cache = ReadCache(DHTLimits(cache_age=10.0))
    cache.put(1, held(record("a"), record("b", 20.0)), loop_time=0.0)
    assert cache.get(1, now=5.0, loop_time=10.0) == [record("a"), record("b", 20.0)]
    assert cache.get(1, now=100.0, loop_time=10.0) is None, "nothing of it is alive"
    assert cache.get(1, now=5.0, loop_time=10.1) is None
    assert cache.get(2, now=5.0, loop_time=0.0) is None


def test_entries_and_bytes_are_bounded() -> None:
    cache = ReadCache(DHTLimits(cache_entries=2))
    for number in (1, 2, 1, 3):
        if cache.get(number, 0.0, 0.0) is None:
            cache.put(number, held(record("a")), loop_time=0.0)
    assert [cache.get(number, 0.0, 0.0) is None for number in (1, 2, 3)] == [False, True, False]
    small = ReadCache(DHTLimits(max_storage=4000))
    small.put(1, held(record("a", value="x" * 500)), 0.0)
    small.put(2, held(record("a", value="x" * 500)), 0.0)
    assert small.get(1, 0.0, 0.0) is None and small.get(2, 0.0, 0.0) is not None
    small.clear()
    assert small.get(2, 0.0, 0.0) is None
