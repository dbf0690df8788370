"""Keys, subkeys and records: what lies under a key, how it is encoded and signed, and which of two records wins."""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from swarmcli.dht.bounds import DHTLimits
from swarmcli.errors import ValidationError
from swarmcli.network import wire
from swarmcli.network.identity import PEER_ID_BYTES, Identity, PeerID
from swarmcli.recent import Recent

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

ID_BITS = 256
ID_BYTES = ID_BITS // 8
NO_SUBKEY = b"\xc0"  # msgpack nil: the record is the key's plain value
_OWNED_EXTENSION = 1  # msgpack extension type of an owned subkey


class OwnedSubkey(msgspec.Struct, frozen=True, order=True):
    """A subkey that only `owner` can write: a record under it counts only with the owner's signature.

    It is a type of its own, on the wire too, and not merely bytes that look like a peer id. `name` tells several
    subkeys of one owner apart.
    """

    owner: PeerID
    name: bytes = b""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """So that a pydantic model may say `dict[OwnedSubkey, …]`."""
        from pydantic_core import core_schema

        return core_schema.is_instance_schema(cls)

    @classmethod
    def __get_validators__(cls) -> Iterator[Callable[[Any], Any]]:
        """The same for models of pydantic.v1."""
        yield cls._checked

    @classmethod
    def _checked(cls, value: Any) -> OwnedSubkey:
        if not isinstance(value, cls):
            raise TypeError("expected an owned subkey")
        return value


Subkey: TypeAlias = str | bytes | int | OwnedSubkey | None


@functools.lru_cache(maxsize=1 << 16)
def node_id(peer_id: PeerID) -> int:
    """Where a peer sits: SHA-256 of its id, so that nobody can choose a place without looking for a key to it."""
    return int.from_bytes(hashlib.sha256(peer_id).digest(), "big")


def key_id(key: str) -> int:
    """Where a key lives: SHA-256 of its UTF-8 bytes."""
    # Long keys are not cached: a stranger's may be as long as a message.
    return (_key_id_lately if len(key) <= _LONGEST_KEY else _key_id)(key)


def _key_id(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest(), "big")


_LONGEST_KEY = DHTLimits().max_key
_key_id_lately = functools.lru_cache(maxsize=1 << 14)(_key_id)


def id_to_bytes(number: int) -> bytes:
    """The 32 bytes in which an id travels."""
    return number.to_bytes(ID_BYTES, "big")


def id_from_bytes(data: bytes) -> int:
    """Reads an id; ValidationError if it has another length than 32 bytes."""
    if len(data) != ID_BYTES:
        raise ValidationError(f"an id has {ID_BYTES} bytes, got {len(data)}")
    return int.from_bytes(data, "big")


def encode_subkey(subkey: Subkey) -> bytes:
    """The one spelling of a subkey. Raises TypeError for what cannot be one, ValueError for an int beyond 64 bits."""
    if subkey is None:
        return NO_SUBKEY
    if isinstance(subkey, OwnedSubkey):
        return msgspec.msgpack.encode(msgspec.msgpack.Ext(_OWNED_EXTENSION, bytes(subkey.owner) + subkey.name))
    if isinstance(subkey, bool) or not isinstance(subkey, str | bytes | int):
        raise TypeError(f"a subkey is str, bytes, int or OwnedSubkey, got {type(subkey).__name__}")
    try:
        return msgspec.msgpack.encode(bytes(subkey) if isinstance(subkey, bytes) else subkey)  # a PeerID, for example
    except OverflowError as error:
        raise ValueError(f"a subkey that is a number has at most 64 bits, got {subkey!r}") from error


@functools.lru_cache(maxsize=1 << 14)
def decode_subkey(data: bytes) -> Subkey:
    """Reads a subkey. Raises ValidationError unless `data` is exactly what `encode_subkey` writes.

    A second spelling of the same subkey would let a stranger hold a place beside its owner's record.
    """
    try:
        value: Any = wire.decode(Any, data)
    except msgspec.DecodeError as error:
        raise ValidationError("the subkey is not readable msgpack") from error
    if isinstance(value, msgspec.msgpack.Ext):
        owned = bytes(value.data)
        if value.code != _OWNED_EXTENSION or len(owned) < PEER_ID_BYTES:
            raise ValidationError(f"the subkey is of an unknown kind: extension {value.code}, {len(owned)} bytes")
        value = OwnedSubkey(PeerID(owned[:PEER_ID_BYTES]), owned[PEER_ID_BYTES:])
    try:
        canonical = encode_subkey(value) == data
    except TypeError as error:
        raise ValidationError(f"the subkey is of a kind that none may be: {type(value).__name__}") from error
    if not canonical:
        raise ValidationError("the subkey is not spelled in the one way that counts")
    return value


def is_owned(subkey: bytes) -> bool:
    """Whether this encoded (and checked) subkey has an owner."""
    return isinstance(decode_subkey(subkey), OwnedSubkey)


SIGNING_PURPOSE = "dht record"
REMEMBERED_WRITES = 1 << 14  # own records whose numbers are remembered
SHORTEST_TOMBSTONE = 60.0  # seconds that a withdrawal lives at least
TOMBSTONE = b""  # no msgpack value is empty


class ValueWithExpiration(NamedTuple):
    """What a reader gets. With subkeys, `value` is a dictionary subkey → ValueWithExpiration."""

    value: Any
    expiration_time: float  # seconds of swarm time


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One value as it is stored and sent. `sequence` and `signature` belong to owned subkeys only."""

    key: str
    subkey: bytes  # as `encode_subkey` writes it
    value: bytes  # msgpack; TOMBSTONE withdraws the subkey
    expiration: float  # seconds of swarm time
    sequence: int = 0
    signature: bytes = b""

    @property
    def rank(self) -> tuple[int, float, bytes, bytes]:
        """The newer of two records has the higher rank.

        Owners number their records, so that a clock that once ran ahead cannot block a later record; others go by
        expiration. The rest only makes the order total, so that every replica decides alike.
        """
        return self.sequence, self.expiration, self.value, self.signature

    @property
    def size(self) -> int:
        """Bytes that this record is charged for, bookkeeping included."""
        return len(self.key) + len(self.subkey) + len(self.value) + len(self.signature) + 128

    def signed_fields(self) -> tuple[bytes, ...]:
        """The owner's signature covers these."""
        numbers = struct.pack(">Qd", self.sequence, self.expiration)
        return self.key.encode(), self.subkey, self.value, numbers

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


LARGE_VALUE = 4096  # bytes; to check a larger record may take much more of the processor than to send it


def decode_value(data: bytes) -> Any:
    """Raises ValidationError for bytes that are no msgpack value."""
    try:
        return wire.decode(Any, data)
    except msgspec.DecodeError as error:
        raise ValidationError(f"the value is not readable msgpack: {error}") from error


def is_bytes(data: bytes) -> bool:
    """Whether an encoded value is bytes; it is not decoded."""
    return data[:1] in (b"\xc4", b"\xc5", b"\xc6")  # msgpack's bin 8, 16 and 32


def merge_record(records: dict[bytes, Record], record: Record) -> bool:
    """Puts a record into a key's records unless a newer one (or the same) is there; says whether it did."""
    known = records.get(record.subkey)
    if known is not None and known.rank >= record.rank:
        return False
    records[record.subkey] = record
    return True


def read_records(records: Iterable[Record], now: float) -> ValueWithExpiration | None:
    """Shows a user a key's records, without withdrawn and expired ones.

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


class Author:
    """Makes records of one's own: encodes and checks them, and numbers and signs those under owned subkeys.

    Signs for one identity or several, and remembers the numbers of the owned records that it made.
    """

    def __init__(self, identity: Identity, limits: DHTLimits) -> None:
        self._identities = {identity.peer_id: identity}
        self._limits = limits
        # (key, subkey) → the last number, and the latest expiration of everything written so far.
        self._written: Recent[tuple[str, bytes], tuple[int, float]] = Recent(REMEMBERED_WRITES)

    def adopt(self, identity: Identity) -> None:
        """From now on this author also writes what that identity owns."""
        self._identities[identity.peer_id] = identity

    def may_write(self, subkey: Subkey) -> bool:
        """Whether this author signs for the owner of `subkey`, if it has one."""
        return not isinstance(subkey, OwnedSubkey) or subkey.owner in self._identities

    def write(self, key: str, subkey: Subkey, value: Any, expiration: float, now: float) -> Record:
        """A record that is ready to be stored, its expiration capped. Raises TypeError and ValueError."""
        if math.isnan(expiration):
            raise ValueError("expiration_time is a time in seconds, got nan")
        encoded = encode_value(value)
        if len(encoded) > self._limits.max_value:
            raise ValueError(f"value has {len(encoded)} bytes; at most {self._limits.max_value} can be stored")
        return self._made(key, subkey, encoded, min(float(expiration), now + self._limits.max_expiration), now)

    def withdraw(self, key: str, subkey: OwnedSubkey, current: Record | None, now: float) -> Record:
        """A tombstone that outlives everything it withdraws: `current` and what this author wrote before."""
        if current is not None:
            self._remember(current)
        _, latest = self._written.get((key, encode_subkey(subkey)), (0, 0.0))
        return self._made(key, subkey, TOMBSTONE, max(latest, now + SHORTEST_TOMBSTONE), now)

    def surpass(self, record: Record, current: Record, now: float) -> Record | None:
        """The record again with a higher number than `current`, which its owner wrote in an earlier life.

        None if this author does not sign for the owner of the record's subkey.
        """
        subkey = decode_subkey(record.subkey)
        if not isinstance(subkey, OwnedSubkey) or subkey.owner not in self._identities:
            return None
        self._remember(current)
        return self._signed(record, subkey, now)

    def _made(self, key: str, subkey: Subkey, value: bytes, expiration: float, now: float) -> Record:
        if not isinstance(key, str):
            raise TypeError(f"key is a str, got {type(key).__name__}")
        if len(key.encode()) > self._limits.max_key:
            raise ValueError(f"key has {len(key.encode())} bytes; at most {self._limits.max_key} are allowed")
        if isinstance(subkey, OwnedSubkey) and not self.may_write(subkey):
            raise ValueError(f"subkey belongs to {subkey.owner.short}; only its owner can write it")
        encoded = encode_subkey(subkey)
        if len(encoded) > self._limits.max_subkey:
            raise ValueError(f"subkey has {len(encoded)} bytes; at most {self._limits.max_subkey} are allowed")
        record = Record(key, encoded, value, expiration)
        return self._signed(record, subkey, now) if isinstance(subkey, OwnedSubkey) else record

    def _signed(self, record: Record, subkey: OwnedSubkey, now: float) -> Record:
        # From the clock, so that an owner that starts anew need not read its last number first; never backwards.
        last, _ = self._written.get((record.key, record.subkey), (0, 0.0))
        numbered = msgspec.structs.replace(record, sequence=max(int(now * 1000), last + 1))
        self._remember(numbered)
        return sign_record(self._identities[subkey.owner], numbered)

    def _remember(self, record: Record) -> None:
        place = record.key, record.subkey
        last, latest = self._written.get(place, (0, 0.0))
        self._written[place] = max(last, record.sequence), max(latest, record.expiration)


def sign_record(identity: Identity, record: Record) -> Record:
    """The same record with the signature of `identity`, who must own its subkey (else ValueError)."""
    subkey = decode_subkey(record.subkey)
    if not isinstance(subkey, OwnedSubkey) or subkey.owner != identity.peer_id:
        raise ValueError(f"{identity.peer_id.short} cannot sign for the subkey {subkey!r}")
    return msgspec.structs.replace(record, signature=identity.sign(SIGNING_PURPOSE, *record.signed_fields()))
