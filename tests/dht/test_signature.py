"""Owned records count only with their owner's signature over every field."""

from __future__ import annotations

import msgspec
import pytest

from swarmcli.dht.records import TOMBSTONE, OwnedSubkey, Record, encode_subkey, encode_value, sign_record
from swarmcli.dht.schema import SignatureValidator
from swarmcli.errors import ValidationError
from swarmcli.network.identity import Identity

OWNER = Identity.from_seed(b"owner")
STRANGER = Identity.from_seed(b"stranger")


def draft(owner: Identity = OWNER, **changes: object) -> Record:
    fields = {"value": encode_value("mine"), "expiration": 100.0, "sequence": 7} | changes
    return Record("key", encode_subkey(OwnedSubkey(owner.peer_id, b"name")), **fields)  # type: ignore[arg-type]


def test_the_owners_record_counts() -> None:
    SignatureValidator().validate(sign_record(OWNER, draft()))
    SignatureValidator().validate(sign_record(OWNER, draft(value=TOMBSTONE)))


@pytest.mark.parametrize(
    "change",
    [
        {"key": "other"},
        {"value": encode_value("yours")},
        {"value": TOMBSTONE},
        {"expiration": 101.0},
        {"sequence": 8},
        {"subkey": encode_subkey(OwnedSubkey(OWNER.peer_id, b"other"))},
        {"subkey": encode_subkey(OwnedSubkey(STRANGER.peer_id, b"name"))},
        {"signature": b"\x00" * 64},
        {"signature": b""},
        {"signature": b"x" * 63},
    ],
)
def test_any_change_breaks_it(change: dict[str, object]) -> None:
    validator = SignatureValidator()
    signed = sign_record(OWNER, draft())
    validator.validate(signed)
    with pytest.raises(ValidationError):
        validator.validate(msgspec.structs.replace(signed, **change))


@pytest.mark.parametrize("sequence", [0, -1, 1 << 63])
def test_sequence_numbers_are_bounded(sequence: int) -> None:
    forged = msgspec.structs.replace(sign_record(OWNER, draft()), sequence=sequence)
    with pytest.raises(ValidationError, match="numbered from 1"):
        SignatureValidator().validate(forged)


@pytest.mark.parametrize("change", [{"sequence": 1}, {"signature": b"x" * 64}, {"value": TOMBSTONE}])
def test_records_without_an_owner_are_neither_numbered_nor_withdrawn(change: dict[str, object]) -> None:
    """A stranger could otherwise outrank everyone for ever."""
    plain = Record("key", encode_subkey("a"), encode_value(1), 100.0)
    SignatureValidator().validate(plain)
    with pytest.raises(ValidationError, match="owned subkeys"):
        SignatureValidator().validate(msgspec.structs.replace(plain, **change))
