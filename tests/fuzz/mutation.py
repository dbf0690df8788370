"""Inputs that are nearly right: a valid one with a few bytes changed, cut out, repeated or put in."""

from __future__ import annotations

import random

MOST = 1 << 16  # bytes of an input

# Lengths and types as msgpack, structs, DER and JSON write them, at their edges.
_TELLING = (
    b"\x00", b"\xff", b"\x7f", b"\x80", b"\xc0", b"\xc1", b"\xc4\xff", b"\xc6\xff\xff\xff\xff", b"\xcf" + b"\xff" * 8,
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00", b"\xd9\xff", b"\xdb\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff", b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x91" * 200, b"\x81\xa1a" * 200, b"[" * 200,
    b'{"a":' * 200, b"NaN", b"1e999", b"-1", b"9" * 400, b'"', b"\n", b"\xed\xa0\x80", b"\x1b[2J", "\u202e".encode(),
)  # fmt: skip


def mutated(seeds: list[bytes], chance: random.Random) -> bytes:
    """One of the seeds, or nothing of them, changed in a few places."""
    known = bool(seeds) and chance.random() < 0.95
    data = bytearray(chance.choice(seeds) if known else chance.randbytes(chance.randrange(64)))
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3, 8))):
        _change(data, seeds, chance)
    return bytes(data[:MOST])


def _change(data: bytearray, seeds: list[bytes], chance: random.Random) -> None:
    at = chance.randrange(len(data) + 1)
    end = min(len(data), at + chance.choice((1, 1, 2, 4, 8, 32, 1000)))
    match chance.randrange(7):
        case 0 if at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        case 1:
            data[at:end] = b""
        case 2:
            data[at:at] = chance.choice(_TELLING)
        case 3:
            telling = chance.choice(_TELLING)
            data[at : at + len(telling)] = telling
        case 4:
            data[at:at] = data[at:end] * chance.choice((1, 2, 50))
        case 5 if seeds:
            other = chance.choice(seeds)
            data[at:end] = other[chance.randrange(len(other) + 1) :][:100]
        case _:
            data[at:end] = chance.randbytes(end - at)
