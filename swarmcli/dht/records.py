"""Records and how they merge.

Of two records under the same key and subkey one is the newer, whoever compares them and in whatever order they
arrive; so replicas that have seen the same records hold the same. A key's plain value and its dictionary of
subkeys are merged record by record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from swarmcli.dht.keys import NO_SUBKEY, Subkey, decode_subkey
from swarmcli.errors import ValidationError
from swarmcli.network import wire

TOMBSTONE = b""  # no msgpack value is empty


class ValueWithExpiration(NamedTuple):
    """What a reader gets. With subkeys, `value` is a dictionary subkey → ValueWithExpiration."""

    value: Any
    expiration_time: float  # seconds of swarm time


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One value as it is stored and sent. `sequence` and `signature` belong to owned subkeys only."""

    key: str
    subkey: bytes  # as `keys.encode_subkey` writes it
    value: bytes  # msgpack; TOMBSTONE withdraws the subkey
    expiration: float  # seconds of swarm time
    sequence: int = 0
    signature: bytes = b""

    @property
    def rank(self) -> tuple[int, float, bytes, bytes]:
        """The newer of two records has the higher rank.

        Owned records are counted by their owner, so that a clock that once ran ahead cannot block him; others go
        by expiration. The rest only makes the order total, so that every replica decides alike.
        """
        return self.sequence, self.expiration, self.value, self.signature

    @property
    def size(self) -> int:
        """Bytes that this record is charged for, bookkeeping included."""
        return len(self.key) + len(self.subkey) + len(self.value) + len(self.signature) + 128

    def fingerprint(self) -> int:
        """64 bits that differ for different records; replicas compare sets of records by them."""
        body = msgspec.msgpack.encode(self)
        return int.from_bytes(hashlib.blake2b(body, digest_size=8).digest(), "big")


def encode_value(value: Any) -> bytes:
    """Raises TypeError or ValueError for what msgpack cannot carry."""
    try:
        return wire.encode(value)
    except (TypeError, OverflowError, RecursionError) as error:
        raise TypeError(f"the value cannot be stored: {error}; expected what msgpack carries") from error


def decode_value(data: bytes) -> Any:
    """Raises ValidationError for bytes that are no msgpack value."""
    try:
        return msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise ValidationError(f"the value is not readable msgpack: {error}") from error


def merge_record(records: dict[bytes, Record], record: Record) -> bool:
    """Puts a record into a key's records unless a newer one (or the same) is there; says whether it did."""
    known = records.get(record.subkey)
    if known is not None and known.rank >= record.rank:
        return False
    records[record.subkey] = record
    return True


def merge_all(records: dict[bytes, Record], others: Iterable[Record]) -> None:
    """Merges many; the result does not depend on their order."""
    for record in others:
        merge_record(records, record)


def read_records(records: Iterable[Record], now: float) -> ValueWithExpiration | None:
    """What a user sees of a key's records: no withdrawn and no expired ones.

    A plain value and a dictionary under one key: the one that expires later is seen.
    """
    plain: ValueWithExpiration | None = None
    dictionary: dict[Subkey, ValueWithExpiration] = {}
    for record in records:
        if record.expiration <= now or record.value == TOMBSTONE:
            continue
        seen = ValueWithExpiration(decode_value(record.value), record.expiration)
        if record.subkey == NO_SUBKEY:
            plain = seen
        else:
            dictionary[decode_subkey(record.subkey)] = seen
    if not dictionary:
        return plain
    latest = max(item.expiration_time for item in dictionary.values())
    if plain is not None and plain.expiration_time >= latest:
        return plain
    return ValueWithExpiration(dictionary, latest)
