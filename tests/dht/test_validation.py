"""Bounds and rules, and the count of what did not pass them."""

from __future__ import annotations

import msgspec
import pytest

from swarmcli.dht.limits import DHTLimits
from swarmcli.dht.records import OwnedSubkey, Record, encode_subkey, encode_value
from swarmcli.dht.schema import RecordChecker
from swarmcli.errors import ValidationError
from swarmcli.network.identity import Identity

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


def test_signatures_are_checked_without_being_asked_for() -> None:
    checker = RecordChecker(LIMITS)
    stolen = msgspec.structs.replace(GOOD, subkey=encode_subkey(OwnedSubkey(Identity.from_seed(1).peer_id)))
    with pytest.raises(ValidationError, match=r"^signature: "):
        checker.check(stolen, now=0.0)


def test_refusals_are_counted_by_key_for_whoever_watches_it() -> None:
    checker = RecordChecker(LIMITS)
    watched = checker.watch("key")
    for record in (GOOD, msgspec.structs.replace(GOOD, key="another")):
        with pytest.raises(ValidationError):
            checker.check(msgspec.structs.replace(record, signature=b"s"), now=0.0)
    assert watched == {"signature": 1} and checker.watch("key") is watched
