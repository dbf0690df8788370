"""Merging: the same records give the same result, in whatever order and how often they arrive."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmcli.dht.records import (
    NO_SUBKEY,
    TOMBSTONE,
    Record,
    ValueWithExpiration,
    decode_value,
    encode_subkey,
    encode_value,
    merge_record,
    read_records,
)
from swarmcli.errors import ValidationError

# Few distinct values, so that ties of sequence, expiration and value happen all the time.
records = st.builds(
    Record,
    key=st.just("key"),
    subkey=st.sampled_from([encode_subkey(name) for name in (None, "a", b"a", 1)]),
    value=st.sampled_from([encode_value(value) for value in (0, 1, "one")]),
    expiration=st.sampled_from([10.0, 20.0, 30.0]),
    sequence=st.integers(0, 2),
    signature=st.sampled_from([b"", b"x", b"y"]),
)


def merged(them: Iterable[Record]) -> dict[bytes, Record]:
    held: dict[bytes, Record] = {}
    for record in them:
        merge_record(held, record)
    return held


@settings(max_examples=30)
@given(st.lists(records), st.randoms(use_true_random=False))
def test_merging_does_not_depend_on_order_or_repetition(them: list[Record], shuffler: random.Random) -> None:
    again = them + [record for record in them if shuffler.random() < 0.5]
    shuffler.shuffle(again)
    assert merged(them) == merged(again)


def test_readers_see_neither_expired_nor_withdrawn_records() -> None:
    live = Record("key", encode_subkey("live"), encode_value([1]), 20.0)
    expired = Record("key", encode_subkey("expired"), encode_value(2), 10.0)
    withdrawn = Record("key", encode_subkey("withdrawn"), TOMBSTONE, 30.0)
    seen = read_records([live, expired, withdrawn], now=10.0)
    assert seen == ({"live": ([1], 20.0)}, 20.0)
    assert read_records([expired, withdrawn], now=10.0) is None


@pytest.mark.parametrize(
    ("plain_expiration", "expected"), [(20.0, "plain"), (19.0, {"a": ValueWithExpiration(1, 20.0)})]
)
def test_of_a_plain_value_and_a_dictionary_the_longer_lived_is_seen(plain_expiration: float, expected: object) -> None:
    plain = Record("key", NO_SUBKEY, encode_value("plain"), plain_expiration)
    item = Record("key", encode_subkey("a"), encode_value(1), 20.0)
    assert read_records([item, plain], now=0.0) == (expected, 20.0)


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x91" * 100_000 + b"\xc0", b"\xdd\xff\xff\xff\xff", b"\xa1\xff", b"\x01\x01"]
)
def test_garbage_values_have_a_named_error(data: bytes) -> None:
    with pytest.raises(ValidationError, match="readable msgpack"):
        decode_value(data)


def test_reading_a_large_value_leaves_the_collector_to_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    switched: list[str] = []
    for name in ("disable", "enable"):
        monkeypatch.setattr(gc, name, partial(switched.append, name))
    assert len(decode_value(encode_value([[]] * 5000))) == 5000
    assert switched == []
