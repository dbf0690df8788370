"""Owned subkeys: who signs what, and how often that is checked."""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict

import msgspec

from swarmcli.dht.keys import OwnedSubkey, decode_subkey
from swarmcli.dht.records import TOMBSTONE, Record
from swarmcli.errors import ValidationError
from swarmcli.network.identity import SIGNATURE_BYTES, Identity, verify

_PURPOSE = "dht record"
_MAX_SEQUENCE = (1 << 63) - 1


class SignatureValidator:
    """Accepts a record under an owned subkey only with its owner's Ed25519 signature over all its fields.

    Every node has one built in. A verification costs 0.1 ms, so records once found good are remembered by hash.
    """

    name = "signature"

    def __init__(self, *, remembered: int = 1 << 15) -> None:
        self._good: OrderedDict[bytes, None] = OrderedDict()
        self._remembered = remembered
        self.verifications = 0  # made so far, those answered from memory not counted

    def validate(self, record: Record) -> None:
        subkey = decode_subkey(record.subkey)
        if not isinstance(subkey, OwnedSubkey):
            _check_unowned(record)
            return
        if not 0 < record.sequence <= _MAX_SEQUENCE:
            raise ValidationError(f"an owned record is numbered from 1, got {record.sequence}")
        if len(record.signature) != SIGNATURE_BYTES:
            raise ValidationError("a record under an owned subkey carries its owner's signature")
        self._verify(subkey, record)

    def _verify(self, subkey: OwnedSubkey, record: Record) -> None:
        digest = hashlib.sha256(msgspec.msgpack.encode(record)).digest()
        if digest in self._good:
            self._good.move_to_end(digest)
            return
        self.verifications += 1
        if not verify(subkey.owner, _PURPOSE, record.signature, *_signed_fields(record)):
            raise ValidationError(f"the signature is not {subkey.owner.short}'s for this record")
        self._good[digest] = None
        if len(self._good) > self._remembered:
            self._good.popitem(last=False)


def sign_record(identity: Identity, record: Record) -> Record:
    """The same record with the signature of `identity`, who must own its subkey (else ValueError)."""
    subkey = decode_subkey(record.subkey)
    if not isinstance(subkey, OwnedSubkey) or subkey.owner != identity.peer_id:
        raise ValueError(f"{identity.peer_id.short} cannot sign for the subkey {subkey!r}")
    signature = identity.sign(_PURPOSE, *_signed_fields(record))
    return msgspec.structs.replace(record, signature=signature)


def _signed_fields(record: Record) -> tuple[bytes, ...]:
    numbers = struct.pack(">Qd", record.sequence, record.expiration)
    return record.key.encode(), record.subkey, record.value, numbers


def _check_unowned(record: Record) -> None:
    """Nobody could tell who numbered, signed or withdrew a record that has no owner."""
    if record.sequence or record.signature:
        raise ValidationError("only records under owned subkeys are numbered and signed")
    if record.value == TOMBSTONE:
        raise ValidationError("only owned subkeys can be withdrawn")
