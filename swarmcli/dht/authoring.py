"""Making records of one's own: encoding, expiration, and for owned subkeys numbering and signing."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from swarmcli.dht.limits import DHTLimits
from swarmcli.dht.records import (
    SIGNING_PURPOSE,
    TOMBSTONE,
    OwnedSubkey,
    Record,
    Subkey,
    decode_subkey,
    encode_subkey,
    encode_value,
)
from swarmcli.network.identity import Identity

_REMEMBERED = 1 << 14
_SHORTEST_TOMBSTONE = 60.0  # seconds that a withdrawal stays, at the least


@dataclass(frozen=True, slots=True)
class _Written:
    sequence: int
    expiration: float  # of everything written so far under the subkey, the latest


class Author:
    """Signs for one identity or several, and remembers the numbers of the owned records that it made."""

    def __init__(self, identity: Identity, limits: DHTLimits) -> None:
        self._identities = {identity.peer_id: identity}
        self._limits = limits
        self._written: OrderedDict[tuple[str, bytes], _Written] = OrderedDict()

    def adopt(self, identity: Identity) -> None:
        """From now on this author also writes what that identity owns."""
        self._identities[identity.peer_id] = identity

    def owns(self, record: Record) -> bool:
        """Whether the record stands under a subkey of an identity that this author signs for."""
        subkey = decode_subkey(record.subkey)
        return isinstance(subkey, OwnedSubkey) and subkey.owner in self._identities

    def write(self, key: str, subkey: Subkey, value: Any, expiration: float, now: float) -> Record:
        """A record that is ready to be stored, its expiration capped. TypeError, ValueError: what is wrong with it."""
        _check_expiration(expiration)
        record = Record(
            key=_checked_key(key, self._limits),
            subkey=self._subkey(subkey),
            value=encode_value(value),
            expiration=min(float(expiration), now + self._limits.max_expiration),
        )
        if len(record.value) > self._limits.max_value:
            raise ValueError(f"value has {len(record.value)} bytes; at most {self._limits.max_value} can be stored")
        return self._sign(record, subkey, now) if isinstance(subkey, OwnedSubkey) else record

    def withdraw(self, key: str, subkey: OwnedSubkey, current: Record | None, now: float) -> Record:
        """A tombstone that outlives everything it withdraws: `current` and what this author wrote before."""
        written = self._written.get((key, encode_subkey(subkey)))
        ends = [now + _SHORTEST_TOMBSTONE]
        ends += [current.expiration] if current is not None else []
        ends += [written.expiration] if written is not None else []
        record = Record(_checked_key(key, self._limits), self._subkey(subkey), TOMBSTONE, max(ends))
        if current is not None:
            self._remember(record.key, record.subkey, current.sequence, current.expiration)
        return self._sign(record, subkey, now)

    def surpass(self, record: Record, current: Record, now: float) -> Record:
        """The record again with a higher number than `current`, one of this owner's from an earlier life."""
        subkey = decode_subkey(record.subkey)
        assert isinstance(subkey, OwnedSubkey)
        self._remember(record.key, record.subkey, current.sequence, current.expiration)
        return self._sign(record, subkey, now)

    def _sign(self, record: Record, subkey: OwnedSubkey, now: float) -> Record:
        # From the clock, so that an owner who starts anew need not ask for his last number first; never backwards.
        written = self._written.get((record.key, record.subkey))
        sequence = max(int(now * 1000), written.sequence + 1 if written is not None else 1)
        self._remember(record.key, record.subkey, sequence, record.expiration)
        return sign_record(self._identities[subkey.owner], msgspec.structs.replace(record, sequence=sequence))

    def _remember(self, key: str, subkey: bytes, sequence: int, expiration: float) -> None:
        before = self._written.pop((key, subkey), _Written(0, 0.0))
        latest = _Written(max(before.sequence, sequence), max(before.expiration, expiration))
        self._written[(key, subkey)] = latest
        if len(self._written) > _REMEMBERED:
            self._written.popitem(last=False)

    def _subkey(self, subkey: Subkey) -> bytes:
        if isinstance(subkey, OwnedSubkey) and subkey.owner not in self._identities:
            raise ValueError(f"subkey belongs to {subkey.owner.short}; only its owner can write it")
        encoded = encode_subkey(subkey)
        if len(encoded) > self._limits.max_subkey:
            raise ValueError(f"subkey has {len(encoded)} bytes; at most {self._limits.max_subkey} are allowed")
        return encoded


def _checked_key(key: str, limits: DHTLimits) -> str:
    if not isinstance(key, str):
        raise TypeError(f"key is a str, got {type(key).__name__}")
    if len(key.encode()) > limits.max_key:
        raise ValueError(f"key has {len(key.encode())} bytes; at most {limits.max_key} are allowed")
    return key


def _check_expiration(expiration: float) -> None:
    if math.isnan(expiration):
        raise ValueError("expiration_time is a time in seconds, got nan")


def sign_record(identity: Identity, record: Record) -> Record:
    """The same record with the signature of `identity`, who must own its subkey (else ValueError)."""
    subkey = decode_subkey(record.subkey)
    if not isinstance(subkey, OwnedSubkey) or subkey.owner != identity.peer_id:
        raise ValueError(f"{identity.peer_id.short} cannot sign for the subkey {subkey!r}")
    signature = identity.sign(SIGNING_PURPOSE, *record.signed_fields())
    return msgspec.structs.replace(record, signature=signature)
