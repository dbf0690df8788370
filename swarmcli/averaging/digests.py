"""Digests stand for averages where members compare, sign and prove; whoever holds an average can repeat its own."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from blake3 import blake3

from swarmcli.compression import TensorMessage


def digest_of(part: int, senders: Sequence[int], weights: Sequence[float], message: TensorMessage | None) -> bytes:
    """BLAKE3 over one part's average after decoding (`message` is of NoCompression): so whoever holds it can prove it.

    What a codec sends may have more than one form for the same values, and receivers do not keep it.
    """
    digest = blake3(b"swarm average" + struct.pack(f">QQ{len(senders)}Q", part, len(senders), *senders))
    digest.update(struct.pack(f">{len(weights)}d", *weights))
    for piece in message.payload if message is not None else ():
        digest.update(piece)
    return digest.digest()


def averages_root(digests: bytes, inputs: bytes) -> bytes:
    """What a reducer signs of all its averages in one try: their digests, in the order of its parts, and in audited
    runs as many hashes of the inputs that they come of."""
    return blake3(b"swarm averages" + struct.pack(">QQ", len(digests), len(inputs)) + digests + inputs).digest()
