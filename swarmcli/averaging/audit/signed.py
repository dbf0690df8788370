"""What senders and reducers sign about the inputs of a part, so that whoever has them later can tell who lied."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from blake3 import blake3

from swarmcli.averaging.config import MAX_WEIGHT, MIN_WEIGHT
from swarmcli.averaging.group import MAX_MEMBERS
from swarmcli.compression import TensorMessage
from swarmcli.network.identity import SIGNATURE_BYTES, Identity, PeerID, verify

# A signature with its check takes as long as adding a part of the usual size. Eight parts are few enough that a
# sender encodes them in advance, and that the first ones need not wait long for the last.
SIGNED_TOGETHER = 8
HASH_BYTES = 32

_PURPOSE = "parts"

Hash = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
PartNumbers = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)], ...], msgspec.Meta(min_length=1, max_length=SIGNED_TOGETHER)
]


class SignedParts(msgspec.Struct, frozen=True):
    """Up to eight parts of one sender, by their numbers in the plan, each with the hash of what it sends for it."""

    parts: PartNumbers
    hashes: Annotated[bytes, msgspec.Meta(max_length=SIGNED_TOGETHER * HASH_BYTES)]
    signature: Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]

    @classmethod
    def of(cls, identity: Identity, where: Exchange, weight: float, parts: Mapping[int, bytes]) -> SignedParts:
        """`parts`: number → hash."""
        numbers, hashes = tuple(parts), b"".join(parts.values())
        return cls(numbers, hashes, identity.sign(_PURPOSE, *_fields(where, weight, numbers, hashes)))

    def is_by(self, sender: PeerID, where: Exchange, weight: float) -> bool:
        """Whether this sender has signed it, for this exchange and with this weight."""
        whole = len(self.hashes) == len(self.parts) * HASH_BYTES
        return whole and verify(sender, _PURPOSE, self.signature, *_fields(where, weight, self.parts, self.hashes))

    def hash_of(self, part: int) -> bytes | None:
        """What was signed for a part; None: nothing."""
        if part not in self.parts:
            return None
        place = self.parts.index(part) * HASH_BYTES
        return self.hashes[place : place + HASH_BYTES]


class Exchange(msgspec.Struct, frozen=True):
    """One try at a round of one averager: what is signed for it counts nowhere else. A leader could give one group to
    two averagers, so the prefix belongs to it."""

    prefix: str
    group_id: bytes


class Input(msgspec.Struct, frozen=True):
    """Who brought what to a part, by the sender's own signature.

    weight   as the sender named and signed it
    counts   how much of it does, as the reducer says: bounds take in what others named
    """

    sender: Annotated[int, msgspec.Meta(ge=0, lt=MAX_MEMBERS)]
    weight: float
    counts: float
    signed: SignedParts

    def fits(self, part: int, message: TensorMessage) -> bool:
        """Whether this is what the sender has signed for the part."""
        return self.signed.hash_of(part) == part_hash(message)


def part_hash(message: TensorMessage) -> bytes:
    """BLAKE3 over an encoded part as it travels, with what is needed to read it."""
    header = message.header
    digest = blake3(f"swarm part {header.codec} {header.dtype} {header.shape}\n".encode())
    for piece in message.payload:
        digest.update(piece)
    return digest.digest()


def inputs_hash(inputs: Sequence[Input]) -> bytes:
    """What a reducer signs beside the digest of an average: the inputs that it comes of, with their signatures."""
    digest = blake3(b"swarm inputs" + struct.pack(">Q", len(inputs)))
    for each in inputs:
        parts, hashes = each.signed.parts, each.signed.hashes
        digest.update(struct.pack(">QddQ", each.sender, each.weight, each.counts, len(parts)))
        digest.update(struct.pack(f">{len(parts)}QQ", *parts, len(hashes)) + hashes + each.signed.signature)
    return digest.digest()


def why_unsound(inputs: Sequence[Input], part: int, members: Sequence[PeerID], where: Exchange) -> str:
    """What is wrong with the inputs that a reducer signed for, so that no honest one would have; "" if nothing is.

    Everyone comes to the same answer from the inputs alone.
    """
    senders = [each.sender for each in inputs]
    if senders != sorted(set(senders)) or (senders and senders[-1] >= len(members)):
        return "inputs of nobody in the group"
    for each in inputs:
        if not MIN_WEIGHT <= each.counts <= each.weight <= MAX_WEIGHT:
            return f"an input of {members[each.sender].short} with an impossible weight"
        if each.signed.hash_of(part) is None or not each.signed.is_by(members[each.sender], where, each.weight):
            return f"an input that {members[each.sender].short} has not signed"
    return ""


def _fields(where: Exchange, weight: float, parts: Sequence[int], hashes: bytes) -> tuple[bytes, ...]:
    numbers = struct.pack(f">{len(parts)}Q", *parts)
    return where.prefix.encode(), where.group_id, struct.pack(">d", weight), numbers, hashes
