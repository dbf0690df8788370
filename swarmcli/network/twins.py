"""Two processes with one key: somebody copied a peer's home, and both run. Each takes the other's place at every peer
that it dials, so nobody averages with either for long.

A peer that both greet asks the one that it knew first whether it still lives. If that was killed, it does not answer,
and the new one takes its place. If both live, the peer shows each what the other has signed: its age, and to which
process it answers. The younger one leaves the network. Only the owner of a key can sign this, and what a dead process
once signed names no process that began after it.
"""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec

from swarmcli.network.identity import Identity, PeerID, verify
from swarmcli.network.wire.messages import Amount, BootID, Words

METHOD = "network.twin"
PATIENCE = 3.0  # seconds for an answer: a live process that takes longer loses its place, but dials again and is older
TOGETHER = 5.0  # seconds: of two that began so close together the smaller boot id stays, since answers take their time
_PURPOSE = "twin"


class Presence(msgspec.Struct, frozen=True):
    """A process's signed age."""

    age: Amount  # seconds since it started, or since this computer last woke up
    signature: Annotated[bytes, msgspec.Meta(max_length=64)]  # over its boot id, that of the other, and the age

    @classmethod
    def sign(cls, identity: Identity, boot_id: bytes, other: bytes, age: float) -> Presence:
        return cls(age, identity.sign(_PURPOSE, boot_id, other, struct.pack(">d", age)))

    def is_of(self, peer: PeerID, boot_id: bytes, other: bytes) -> bool:
        """Whether the process with this boot id has signed it in answer to the `other`."""
        signed = boot_id, other, struct.pack(">d", self.age)
        return boot_id != other and verify(peer, _PURPOSE, self.signature, *signed)


class TwinSeen(msgspec.Struct, frozen=True):
    """The sender was greeted by another process with the receiver's key. The receiver answers with its `Presence`."""

    boot_id: BootID
    address: Words  # where the sender sees it
    presence: Presence | None = None  # of the other process, once the sender has it


def was_first(age: float, boot_id: bytes, than_age: float, than: bytes) -> bool:
    """Whether the process with the first age and boot id stays, and the other goes. An age signed a while ago is too
    small by that, so of two processes that judge each other at most one goes."""
    if abs(age - than_age) <= TOGETHER:
        return boot_id < than
    return age > than_age
