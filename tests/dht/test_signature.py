"""Records: with their owner's numbers and signature over every field, and within bounds."""

from __future__ import annotations

import msgspec
import pytest

from swarmcli.dht.bounds import DHTLimits
from swarmcli.dht.records import TOMBSTONE, Author, OwnedSubkey, Record, encode_subkey, encode_value, sign_record
from swarmcli.dht.schema import RecordChecker, SignatureValidator
from swarmcli.errors import ValidationError
from swarmcli.network.identity import Identity

OWNER = Identity.from_seed(b"owner")
STRANGER = Identity.from_seed(b"stranger")


def draft(owner: Identity = OWNER, **changes: object) -> Record:
    fields = {"value": encode_value("mine"), "expiration": 100.0, "sequence": 7} | changes
    return Record("key", encode_subkey(OwnedSubkey(owner.peer_id, b"name")), **fields)  # type: ignore[arg-type]


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


LIMITS = DHTLimits(max_key=20, max_subkey=48, max_value=100, max_expiration=1000.0, expiration_slack=100.0)
GOOD = Record("key", encode_subkey("a"), encode_value(1), 500.0)


@pytest.mark.parametrize(
    "change",
    [
        {"key": "k" * 21},
        {"key": "ü" * 11},
        {"subkey": encode_subkey("s" * 60)},
        {"subkey": b"\xcc\x01"},
        {"value": encode_value(b"v" * 101)},
        {"value": b"\xc1"},
        {"expiration": 1100.1},
        {"expiration": float("inf")},
        {"expiration": float("nan")},
    ],
)
def test_bounds(change: dict[str, object]) -> None:
    checker = RecordChecker(LIMITS)
    checker.check(GOOD, now=0.0)
    with pytest.raises(ValidationError, match=r"^bounds: "):
        checker.check(msgspec.structs.replace(GOOD, **change), now=0.0)


def test_refusals_are_counted_by_key_for_whoever_watches_it() -> None:
    checker = RecordChecker(LIMITS)
    watched = checker.watch("key")
    for record in (GOOD, msgspec.structs.replace(GOOD, key="another")):
        with pytest.raises(ValidationError):
            checker.check(msgspec.structs.replace(record, signature=b"s"), now=0.0)
    assert watched == {"signature": 1} and checker.watch("key") is watched


AUTHOR = Identity.from_seed(b"author")
MINE = OwnedSubkey(AUTHOR.peer_id)


def test_numbers_only_rise_even_if_the_clock_does_not() -> None:
    author = Author(AUTHOR, DHTLimits())
    numbers = [author.write("key", MINE, 1, 2000.0, now).sequence for now in (1000.0, 1000.0, 500.0, 1001.0)]
    assert numbers == [1_000_000, 1_000_001, 1_000_002, 1_001_000]


def test_a_tombstone_outlives_everything_it_withdraws() -> None:
    author = Author(AUTHOR, DHTLimits())
    long = author.write("key", MINE, 1, 9000.0, now=1000.0)
    author.write("key", MINE, 2, 1100.0, now=1000.0)
    tombstone = author.withdraw("key", MINE, None, now=1010.0)
    assert tombstone.value == TOMBSTONE and tombstone.expiration == long.expiration
    SignatureValidator().validate(tombstone)
    unknown = Author(AUTHOR, DHTLimits()).withdraw("key", MINE, None, now=1000.0)
    assert unknown.expiration == 1060.0
    found = Author(AUTHOR, DHTLimits()).withdraw("key", MINE, long, now=1000.0)
    assert found.expiration == 9000.0 and found.sequence > long.sequence
