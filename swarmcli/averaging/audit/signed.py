"""Senders and reducers sign the parts of a round, and the reducers' signatures decide which parts an auditor checks.

    the auditor makes a secret                      ──▶ its hash goes to each reducer before the first part
    a reducer signs its averages and their inputs   ──▶ seed = hash(secret, signature)
    once all have signed, the auditor asks for the parts that the seeds name, and shows secret and signature

So nobody, not even the auditor, knows the parts before the reducers have signed. Of all auditors' secrets only its own
is in an auditor's seeds, so nobody else can withhold anything to change an honest auditor's draw. Liars can only bias
their own audits, and nobody relies on these. A reducer that lies must fear each honest member.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
from blake3 import blake3

from swarmcli.averaging.certificate import Hash, Signature
from swarmcli.averaging.config import MAX_WEIGHT, MIN_WEIGHT
from swarmcli.averaging.group import MAX_MEMBERS
from swarmcli.compression import TensorMessage
from swarmcli.network.identity import Identity, PeerID, verify

AVERAGES = "averages"  # purpose of a reducer's signature over the digests of all its averages
_PURPOSE = "part"


class SignedAverages(msgspec.Struct, frozen=True):
    """A reducer's signature for the averages that it gave: `averages_root` of the digests of all its parts."""

    root: Hash
    signature: Signature

    def is_by(self, reducer: PeerID, prefix: str, group_id: bytes) -> bool:
        """Whether this reducer signed it, in this exchange of this averager. The prefix is signed too, since a leader
        could give one group to two averagers of a peer."""
        return verify(reducer, AVERAGES, self.signature, prefix.encode(), group_id, self.root)


class Exchange(msgspec.Struct, frozen=True):
    """Names one exchange of one averager: signatures for it count nowhere else. The prefix is part of the name, since a
    leader could give one group to two averagers."""

    prefix: str
    group_id: bytes

    def sign(self, identity: Identity, part: int, weight: float, content: bytes) -> bytes:
        """A sender signs the hash of its encoded values for a part, and their weight."""
        return identity.sign(_PURPOSE, *self._fields(part, weight, content))

    def is_signed(self, sender: PeerID, part: int, weight: float, content: bytes, signature: bytes) -> bool:
        return verify(sender, _PURPOSE, signature, *self._fields(part, weight, content))

    def _fields(self, part: int, weight: float, content: bytes) -> tuple[bytes, ...]:
        return self.prefix.encode(), self.group_id, struct.pack(">Qd", part, weight), content


class Input(msgspec.Struct, frozen=True):
    """What one sender has signed for a part.

    weight   as the sender named and signed it
    counts   the weight that counts, as the reducer says: bounds depend on the other senders' weights
    content  hash of the encoded values
    """

    sender: Annotated[int, msgspec.Meta(ge=0, lt=MAX_MEMBERS)]
    weight: float
    counts: float
    content: Hash
    signature: Signature


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
        digest.update(struct.pack(">Qdd", each.sender, each.weight, each.counts) + each.content + each.signature)
    return digest.digest()


def why_unsound(inputs: Sequence[Input], part: int, members: Sequence[PeerID], where: Exchange) -> str:
    """Why no honest reducer would have signed for these inputs; "" if one could have. It depends on the inputs alone,
    so all members come to the same answer."""
    senders = [each.sender for each in inputs]
    if senders != sorted(set(senders)) or (senders and senders[-1] >= len(members)):
        return "inputs of no member of the group"
    for each in inputs:
        if not MIN_WEIGHT <= each.counts <= each.weight <= MAX_WEIGHT:
            return f"an input of {members[each.sender].short} with an impossible weight"
        if not where.is_signed(members[each.sender], part, each.weight, each.content, each.signature):
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
    """What a reducer signs for all its averages in one try: a hash over their digests, in the order of its parts, and
    in audited runs over as many hashes of their inputs."""
    return blake3(b"swarm averages" + struct.pack(">QQ", len(digests), len(inputs)) + digests + inputs).digest()


def commitment(secret: bytes) -> bytes:
    """The hash of a secret, which a member shows before it uses the secret."""
    return blake3(b"swarm audit secret" + secret).digest()


def drawn(secret: bytes, signature: bytes, parts: Iterable[int], chance: float) -> list[int]:
    """The parts that this auditor checks: each of `parts` with the same chance."""
    seed = blake3(b"swarm audit seed" + secret + signature).digest()
    limit = math.ceil(chance * 2.0**64)
    draws = {part: blake3(seed + part.to_bytes(8, "big")).digest(length=8) for part in parts}
    return [part for part, draw in draws.items() if int.from_bytes(draw, "big") < limit]


def chance_for(share: float, auditors: int) -> float:
    """The chance with which each of the `auditors` checks a part, if together they are to check `share` of all."""
    return min(1.0, share / auditors) if auditors else 0.0
