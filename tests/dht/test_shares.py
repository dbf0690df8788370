"""Which network is charged for what a node keeps: none takes the others' place."""

from __future__ import annotations

from typing import Any

from swarmcli.dht.bounds import DHTLimits
from swarmcli.dht.records import OwnedSubkey, Record, Subkey, encode_subkey, encode_value, key_id
from swarmcli.dht.storage import RecordWriter, Storage, StoreVerdict
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.prefix import prefix_of
from swarmcli.reach.relay_messages import RELAYS_KEY

PEERS = [Identity.from_seed(seed).peer_id for seed in range(64)]
DAY = 86400.0


def peer(number: int) -> PeerID:
    return PeerID(number.to_bytes(32, "big"))


def record(subkey: Subkey, *, key: str = "key", value: object = 1, expiration: float = 60.0, **more: Any) -> Record:
    return Record(key, encode_subkey(subkey), encode_value(value), expiration, **more)


def owned(owner: PeerID, **more: Any) -> Record:
    signed: dict[str, Any] = {"sequence": 1, "signature": b"s" * 64} | more
    return record(OwnedSubkey(owner), **signed)


def at(host: str, who: PeerID) -> RecordWriter:
    return RecordWriter(who, prefix_of(host))


def held(storage: Storage, key: str = "key") -> set[bytes]:
    return {each.subkey for each in storage.records(key_id(key))}


def flood(storage: Storage, host: str, count: int, *, start: int = 1000, **more: Any) -> int:
    """A throwaway key per record; how many were kept."""
    keys = map(peer, range(start, start + count))
    return [storage.put(owned(key, **more), 0.0, at(host, key)) for key in keys].count(StoreVerdict.STORED)


def test_throwaway_keys_of_one_prefix_fill_no_key() -> None:
    storage = Storage(DHTLimits())
    assert flood(storage, "198.51.100.1", 4096) == 512
    assert storage.put(owned(PEERS[0]), 0.0, at("203.0.113.1", PEERS[0])) is StoreVerdict.STORED


def test_a_full_key_makes_room_at_the_cost_of_the_fullest_prefix() -> None:
    """Eight hostile prefixes fill it; then forty honest peers come, one by one, and none of them is lost again."""
    storage = Storage(DHTLimits())
    for number in range(8):
        flood(storage, f"198.51.{number}.1", 512, start=1000 * (number + 1))
    assert storage.count() == 4096
    for number, honest in enumerate(PEERS[:40]):
        assert storage.put(owned(honest), 0.0, at(f"203.0.{number}.1", honest)) is StoreVerdict.STORED
        flood(storage, "198.51.3.1", 100, start=10_000 + 100 * number)
    names = held(storage)
    assert len(names) == 4096 and all(encode_subkey(OwnedSubkey(honest)) in names for honest in PEERS[:40])


def test_within_a_prefix_who_has_been_there_for_long_stays() -> None:
    """Only by who came first can honest peers of the flood's own network be told from the flood."""
    storage = Storage(DHTLimits(max_subkeys=100, prefixes_in_key=1))
    host = "198.51.100.1"
    for honest in PEERS[:10]:
        assert storage.put(owned(honest), 0.0, at(host, honest)) is StoreVerdict.STORED
    flood(storage, host, 200)
    for honest in PEERS[:10]:  # an update is no newcomer
        assert storage.put(owned(honest, sequence=2), 0.0, at(host, honest)) is StoreVerdict.STORED
    for number in range(20):
        storage.put(owned(PEERS[20 + number]), 0.0, at(f"203.0.{number}.1", PEERS[20 + number]))
    assert {encode_subkey(OwnedSubkey(each)) for each in (*PEERS[:10], *PEERS[20:40])} <= held(storage)


def test_what_was_handed_over_is_its_owners_as_soon_as_that_one_shows_up() -> None:
    storage = Storage(DHTLimits())
    mine, replica = at("203.0.113.1", PEERS[1]), at("198.51.100.1", PEERS[0])
    for said in (owned(PEERS[1]), owned(PEERS[1], sequence=2)):
        assert storage.put(said, 0.0, replica) is StoreVerdict.STORED
        held_by = [each.prefix for each in storage.entry(key_id("key"), 0.0).records.values()]  # type: ignore[union-attr]
        assert held_by == [replica.prefix if said.sequence == 1 else mine.prefix], "who repeats it changes nothing"
        storage.put(said, 0.0, mine)
        held_by = [each.prefix for each in storage.entry(key_id("key"), 0.0).records.values()]  # type: ignore[union-attr]
        assert held_by == [mine.prefix]


def test_an_owner_renews_its_record_though_its_network_has_no_place_left() -> None:
    storage = Storage(DHTLimits())
    storage.put(owned(PEERS[1]), 0.0, at("203.0.113.1", PEERS[0]))
    flood(storage, "198.51.100.1", 600)
    assert storage.put(owned(PEERS[1], sequence=2), 0.0, at("198.51.100.1", PEERS[1])) is StoreVerdict.STORED


def test_one_network_does_not_fill_a_node() -> None:
    limits = DHTLimits()
    storage = Storage(limits)
    for number in range(1000):
        block = record(number, key=f"key {number % 50}", value=b"x" * 100_000)
        storage.put(block, 0.0, at("198.51.100.1", PEERS[number % 64]))
    assert storage.size <= limits.storage_per_prefix < limits.max_storage // 2


def test_a_full_node_makes_room_at_the_cost_of_the_fullest_prefix() -> None:
    storage = Storage(DHTLimits(max_storage=1 << 20))
    for number in range(200):
        storage.put(record(number, value=b"x" * 10_000), 0.0, at("198.51.100.1", PEERS[number % 64]))
    for number in range(50):
        said = record(number, key="honest", value=b"x" * 5000)
        assert storage.put(said, 0.0, at("203.0.113.1", PEERS[0])) is StoreVerdict.STORED
    assert len(held(storage, "honest")) == 50 and storage.size <= 1 << 20
    big = record(0, key="hostile", value=b"x" * 100_000)
    assert storage.put(big, 0.0, at("198.51.100.1", PEERS[0])) is StoreVerdict.FULL


def test_tiny_records_push_out_nobody_who_keeps_large_ones() -> None:
    storage = Storage(DHTLimits(max_stored=100))
    for number in range(30):
        said = record(0, key=f"honest {number}", value=b"x" * 5000)
        assert storage.put(said, 0.0, at("203.0.113.1", PEERS[1])) is StoreVerdict.STORED
    for number in range(150):
        storage.put(record(0, key=f"hostile {number}"), 0.0, at("198.51.100.1", PEERS[0]))
    for number in range(30, 50):
        said = record(0, key=f"honest {number}", value=b"x" * 5000)
        assert storage.put(said, 0.0, at("203.0.113.1", PEERS[1])) is StoreVerdict.STORED
    assert storage.count() == 100 and all(held(storage, f"honest {number}") for number in range(50))


def test_the_relays_key_is_small_and_has_room_for_every_prefix() -> None:
    limits = DHTLimits()
    storage = Storage(limits)
    for number in range(64):
        flood(storage, f"198.51.{number}.1", 64, start=1000 * (number + 1), key=RELAYS_KEY)
    assert len(held(storage, RELAYS_KEY)) == limits.max_directory
    honest = owned(PEERS[0], key=RELAYS_KEY)
    assert storage.put(honest, 0.0, at("203.0.113.1", PEERS[0])) is StoreVerdict.STORED


def test_one_prefix_has_an_eighth_of_the_places_for_relays() -> None:
    storage = Storage(DHTLimits())
    assert flood(storage, "198.51.100.1", 256, key=RELAYS_KEY) == 32
    assert storage.put(owned(PEERS[0], key=RELAYS_KEY), 0.0, at("203.0.113.1", PEERS[0])) is StoreVerdict.STORED
