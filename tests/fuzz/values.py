"""Inputs that are well-formed, with values that no honest peer sends: by types and values, where `mutation` goes by
bytes. A valid input is read, one or a few of its values are replaced, and it is written again."""

from __future__ import annotations

import json
import math
import random
import struct
from typing import Any

import msgspec

_DEEP = 2000  # deeper than Python nests, in few bytes


def timestamp(seconds: int, nanoseconds: int = 0) -> bytes:
    """The msgpack timestamp of 12 bytes: any moment between 292 billion years ago and ahead."""
    return b"\xc7\x0c\xff" + struct.pack(">Iq", nanoseconds, seconds)


YEAR_10000 = timestamp(253_402_300_800)

_SECONDS = (0, -1, 2**31, 2**32, 2**34, 2**62, 2**63 - 1, -(2**63), 253_402_300_799, 253_402_300_800, -62_135_596_801)
_INTEGERS = (0, 1, -1, 127, 128, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
_FLOATS = (0.0, -0.0, math.nan, math.inf, -math.inf, 1.7e308, -1.7e308, 5e-324, 1e12, 2.0**53, -1.0)
_TEXTS = (
    b"", b"\0", b"\xff", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\x80", b"x" * 5000, b"9" * 5000, b"\x1b[2J",
    "\u202e\u2028".encode(), b"NaN", b"1e999", b"2001-99-99", b"tcp://[::1%25]:99999", b"../../etc", b"0" * 64,
)  # fmt: skip
_JSON = (
    "9" * 5000, "-" + "9" * 5000, "1e999", "-1e999", "NaN", "Infinity", "1" + "0" * 400, '"\\ud800"', '"\\u0000"',
    "null", "true", '"2001-99-99"', '"' + "x" * 5000 + '"', "[]", "{}", '{"": {"": 0}}', "[" * 200 + "]" * 200, "-0",
)  # fmt: skip


def hostile(chance: random.Random, depth: int = 0) -> bytes:
    """One msgpack value of any type, most at the edges of it."""
    kind = chance.randrange(12 if depth < 4 else 8)
    match kind:
        case 0:
            return timestamp(chance.choice(_SECONDS), chance.choice((0, 1, 999_999_999, 2**30, 2**32 - 1)))
        case 1:
            code, size = (
                chance.choice((-128, -2, -1, 0, 1, 2, 127)),
                chance.choice((0, 1, 2, 4, 8, 12, 16, 31, 32, 300)),
            )
            return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, chance.randbytes(size)))
        case 2:
            return msgspec.msgpack.encode(chance.choice(_INTEGERS))
        case 3:
            return msgspec.msgpack.encode(chance.choice(_FLOATS))
        case 4:
            text = chance.choice(_TEXTS)
            return b"\xda" + struct.pack(">H", len(text)) + text
        case 5:
            return msgspec.msgpack.encode(chance.randbytes(chance.choice((0, 1, 16, 31, 32, 33, 64, 5000))))
        case 6:
            return chance.choice((b"\xc0", b"\xc2", b"\xc3", b"\xca\x7f\x80\0\0", b"\x90", b"\x80"))
        case 7:
            return chance.choice((b"\x91", b"\x81\xa1a", b"\x81\x91")) * _DEEP + b"\xc0"
        case 8 | 9:
            return _array([hostile(chance, depth + 1) for _ in range(chance.choice((0, 1, 2, 8)))])
        case _:
            keys = [hostile(chance, depth + 1) for _ in range(chance.choice((0, 1, 2, 8)))]
            return _map([(key, hostile(chance, depth + 1)) for key in keys * chance.choice((1, 1, 2))])


def altered(seed: bytes, chance: random.Random) -> bytes | None:
    """The seed with values of another kind in some places; None if it is neither msgpack nor JSON."""
    try:
        return _packed(msgspec.msgpack.decode(seed), chance, _odds(chance))
    except (msgspec.DecodeError, ValueError):
        pass
    try:
        value = json.loads(seed)
    except ValueError:
        return None
    written = json.dumps(_marked(value, chance, _odds(chance)))
    while _MARK in written:
        written = written.replace(f'"{_MARK}"', chance.choice(_JSON), 1)
    return written.encode()


_MARK = "*put something else here*"


def _odds(chance: random.Random) -> float:
    return chance.choice((0.02, 0.1, 0.1, 0.3, 1.0))


def _packed(value: Any, chance: random.Random, odds: float) -> bytes:
    if chance.random() < odds:
        return hostile(chance)
    match value:
        case dict():
            pairs = [(_packed(key, chance, odds / 4), _packed(each, chance, odds)) for key, each in value.items()]
            return _map([pair for pair in pairs if chance.random() > odds / 8])
        case list() | tuple():
            return _array([_packed(each, chance, odds) for each in value] * chance.choice((1, 1, 1, 2)))
        case bytes() if chance.random() < 0.5 and (inner := altered(value, chance)) is not None:
            return msgspec.msgpack.encode(inner)  # messages travel in messages
        case _:
            return msgspec.msgpack.encode(value)


def _marked(value: Any, chance: random.Random, odds: float) -> Any:
    if chance.random() < odds:
        return _MARK
    match value:
        case dict():
            return {key: _marked(each, chance, odds) for key, each in value.items() if chance.random() > odds / 8}
        case list():
            return [_marked(each, chance, odds) for each in value]
        case _:
            return value


def _array(pieces: list[bytes]) -> bytes:
    return b"\xdd" + struct.pack(">I", len(pieces)) + b"".join(pieces)


def _map(pairs: list[tuple[bytes, bytes]]) -> bytes:
    return b"\xdf" + struct.pack(">I", len(pairs)) + b"".join(key + value for key, value in pairs)
