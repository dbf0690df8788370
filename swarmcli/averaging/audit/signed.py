"""Senders sign their parts, reducers their averages with the inputs: so an auditor can tell later who lied.

    the auditor draws a secret for each reducer     ──▶ its hash goes to the reducer before the first part
    the reducer signs its averages and their inputs ──▶ seed = hash(secret, signature)
    the auditor asks for the parts that the seed names, and shows the secret

So nobody knows the parts before the reducer has signed, the auditor itself included. Each auditor's seed depends on its
own secret alone: no other member can withhold anything to change an honest auditor's draw. Only liars can bias their
own audits, and nobody relies on these. A reducer that lies must fear each honest member by itself.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
from blake3 import blake3

from swarmcli.averaging.config import MAX_WEIGHT, MIN_WEIGHT
from swarmcli.averaging.consensus.messages import DIGEST_BYTES
from swarmcli.averaging.group import MAX_MEMBERS
from swarmcli.compression import TensorMessage
from swarmcli.network.identity import SIGNATURE_BYTES, Identity, PeerID, verify

# A signature with its check takes as long as adding a part of the usual size. Eight parts are few enough that a
# sender encodes them in advance, and that the first ones need not wait long for the last.
SIGNED_TOGETHER = 8

_PURPOSE = "parts"

PartNumbers = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)], ...], msgspec.Meta(min_length=1, max_length=SIGNED_TOGETHER)
]


class SignedParts(msgspec.Struct, frozen=True):
    """Up to eight parts of one sender, by their numbers in the plan, each with the hash of its encoded values."""

    parts: PartNumbers
    hashes: Annotated[bytes, msgspec.Meta(max_length=SIGNED_TOGETHER * DIGEST_BYTES)]
    signature: Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]

    @classmethod
    def of(cls, identity: Identity, where: Exchange, weight: float, parts: Mapping[int, bytes]) -> SignedParts:
        """`parts`: number → hash."""
        numbers, hashes = tuple(parts), b"".join(parts.values())
        return cls(numbers, hashes, identity.sign(_PURPOSE, *_fields(where, weight, numbers, hashes)))

    def is_by(self, sender: PeerID, where: Exchange, weight: float) -> bool:
        """Whether this sender has signed it, for this exchange and with this weight."""
        whole = len(self.hashes) == len(self.parts) * DIGEST_BYTES
        return whole and verify(sender, _PURPOSE, self.signature, *_fields(where, weight, self.parts, self.hashes))

    def hash_of(self, part: int) -> bytes | None:
        """The signed hash of a part; None: it is not among them."""
        if part not in self.parts:
            return None
        place = self.parts.index(part) * DIGEST_BYTES
        return self.hashes[place : place + DIGEST_BYTES]


class Exchange(msgspec.Struct, frozen=True):
    """One try at a round of one averager: signatures for it count nowhere else. A leader could give one group to two
    averagers, so the prefix belongs to it."""

    prefix: str
    group_id: bytes


class Input(msgspec.Struct, frozen=True):
    """One sender's values for a part, by the sender's own signature.

    weight   as the sender named and signed it
    counts   the weight that counts, as the reducer says: bounds depend on the other senders' weights
    """

    sender: Annotated[int, msgspec.Meta(ge=0, lt=MAX_MEMBERS)]
    weight: float
    counts: float
    signed: SignedParts

    def fits(self, part: int, message: TensorMessage) -> bool:
        """Whether the sender has signed this message for the part."""
        return self.signed.hash_of(part) == part_hash(message)


def part_hash(message: TensorMessage) -> bytes:
    """BLAKE3 over an encoded part as it travels, with its header."""
    header = message.header
    digest = blake3(f"swarm part {header.codec} {header.dtype} {header.shape}\n".encode())
    for piece in message.payload:
        digest.update(piece)
    return digest.digest()


def inputs_hash(inputs: Sequence[Input]) -> bytes:
    """BLAKE3 over the inputs of an average, with their signatures: a reducer signs it beside the average's digest."""
    digest = blake3(b"swarm inputs" + struct.pack(">Q", len(inputs)))
    for each in inputs:
        parts, hashes = each.signed.parts, each.signed.hashes
        digest.update(struct.pack(">QddQ", each.sender, each.weight, each.counts, len(parts)))
        digest.update(struct.pack(f">{len(parts)}QQ", *parts, len(hashes)) + hashes + each.signed.signature)
    return digest.digest()


def why_unsound(inputs: Sequence[Input], part: int, members: Sequence[PeerID], where: Exchange) -> str:
    """Why no honest reducer would have signed for these inputs; "" if one could have.

    All members come to the same answer from the inputs alone.
    """
    senders = [each.sender for each in inputs]
    if senders != sorted(set(senders)) or (senders and senders[-1] >= len(members)):
        return "inputs of no member of the group"
    for each in inputs:
        if not MIN_WEIGHT <= each.counts <= each.weight <= MAX_WEIGHT:
            return f"an input of {members[each.sender].short} with an impossible weight"
        if each.signed.hash_of(part) is None or not each.signed.is_by(members[each.sender], where, each.weight):
            return f"an input that {members[each.sender].short} has not signed"
    return ""


def digest_of(part: int, senders: Sequence[int], weights: Sequence[float], message: TensorMessage | None) -> bytes:
    """BLAKE3 over one part's average after decoding (`message` is of NoCompression): a member that holds the average
    can prove it.

    A codec may have more than one form for the same values, and receivers do not keep the encoded one.
    """
    digest = blake3(b"swarm average" + struct.pack(f">QQ{len(senders)}Q", part, len(senders), *senders))
    digest.update(struct.pack(f">{len(weights)}d", *weights))
    for piece in message.payload if message is not None else ():
        digest.update(piece)
    return digest.digest()


def averages_root(digests: bytes, inputs: bytes) -> bytes:
    """A reducer signs this for all its averages in one try: their digests, in the order of its parts, and in audited
    runs as many hashes of their inputs."""
    return blake3(b"swarm averages" + struct.pack(">QQ", len(digests), len(inputs)) + digests + inputs).digest()


def commitment(secret: bytes) -> bytes:
    """The hash of a secret, which a member may show before it uses the secret."""
    return blake3(b"swarm audit secret" + secret).digest()


def drawn(secret: bytes, signature: bytes, parts: Iterable[int], chance: float) -> list[int]:
    """The parts that this auditor looks at: each of `parts` with the same chance."""
    seed = blake3(b"swarm audit seed" + secret + signature).digest()
    limit = math.ceil(chance * 2.0**64)
    draws = {part: blake3(seed + part.to_bytes(8, "big")).digest(length=8) for part in parts}
    return [part for part, draw in draws.items() if int.from_bytes(draw, "big") < limit]


def chance_for(share: float, auditors: int) -> float:
    """The chance with which each of so many auditors looks at a part, if they are to look at `share` of all parts."""
    return min(1.0, share / auditors) if auditors else 0.0


def _fields(where: Exchange, weight: float, parts: Sequence[int], hashes: bytes) -> tuple[bytes, ...]:
    numbers = struct.pack(f">{len(parts)}Q", *parts)
    return where.prefix.encode(), where.group_id, struct.pack(">d", weight), numbers, hashes
