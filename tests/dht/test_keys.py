"""Ids and subkeys."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmcli.dht.records import (
    OwnedSubkey,
    decode_subkey,
    encode_subkey,
    is_owned,
)
from swarmcli.errors import ValidationError
from swarmcli.network.identity import Identity, PeerID

PEER = Identity.from_seed(1).peer_id
owned = st.builds(OwnedSubkey, st.binary(min_size=32, max_size=32).map(PeerID), st.binary(max_size=64))
subkeys = st.none() | st.text() | st.binary() | st.integers(-(2**63), 2**64 - 1) | owned


@given(subkeys)
def test_subkeys_come_back_as_they_went(subkey: object) -> None:
    back = decode_subkey(encode_subkey(subkey))
    assert back == subkey and type(back) is type(subkey)


@pytest.mark.parametrize(
    "data",
    [
        b"\xcc\x01",  # 1 in two bytes
        b"\xc7\x20\x01" + b"x" * 32 + b"more",  # an owned subkey with something behind it
        b"\xc7\x1f\x01" + b"x" * 31,  # an owner that is too short
        b"\xc7\x20\x02" + b"x" * 32,  # another extension
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode(True),
        b"",
        b"\xc1",
        b"\x91" * 50_000,
    ],
)
def test_second_spellings_and_other_kinds_are_refused(data: bytes) -> None:
    with pytest.raises(ValidationError):
        decode_subkey(data)


def test_bytes_that_look_like_a_peer_are_nobodys() -> None:
    assert not is_owned(encode_subkey(bytes(PEER)))
    assert not is_owned(encode_subkey(PEER))
    assert is_owned(encode_subkey(OwnedSubkey(PEER)))
