"""Which parts an auditor looks at: nobody knows before the reducer has signed, the auditor itself included.

    the auditor draws a secret for each reducer     ──▶ its hash goes to the reducer before the first part
    the reducer signs its averages and their inputs ──▶ seed = hash(secret, signature)
    the auditor asks for the parts that the seed names, and shows the secret

An auditor with a secret of its own needs nobody else's for its seed: so there is nothing to withhold that would turn
the draw of an honest one. What bias is left is of liars about their own audits, which nobody counts on anyway. A
reducer that lies must fear each honest member by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from blake3 import blake3


def commitment(secret: bytes) -> bytes:
    """What may be shown of a secret before it is used."""
    return blake3(b"swarm audit secret" + secret).digest()


def drawn(secret: bytes, signature: bytes, parts: Iterable[int], chance: float) -> list[int]:
    """Those of the parts that this auditor looks at, each with the same chance."""
    seed = blake3(b"swarm audit seed" + secret + signature).digest()
    limit = math.ceil(chance * 2.0**64)
    return [part for part in parts if _number(seed, part) < limit]


def chance_for(share: float, auditors: int) -> float:
    """With which chance each of so many auditors looks at a part, if `share` of all parts is to be looked at."""
    return min(1.0, share / auditors) if auditors else 0.0


def _number(seed: bytes, part: int) -> int:
    return int.from_bytes(blake3(seed + part.to_bytes(8, "big")).digest(length=8), "big")
