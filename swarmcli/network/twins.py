"""Two processes with one key: somebody copied a peer's home, and both run. Each takes the other's place at everybody
whom it dials, so nobody averages with either for long.

A peer that both greet asks the one that it knew whether it still lives. A process that was killed does not answer, and
the new one takes its place. Of two that live the peer shows each what the other has signed: for how long that has been
there, and in answer to which process. The younger one leaves the network. Nobody but the owner of a key can sign this,
and what a dead process once signed names no process that began after it.
"""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec

from swarmcli.network.identity import Identity, PeerID, verify
from swarmcli.network.wire.messages import Amount, BootID, Words

METHOD = "network.twin"
PATIENCE = 3.0  # seconds for an answer: a process that is alive and takes longer comes again, and is the older one
TOGETHER = 5.0  # seconds: of two that began so close to each other the smaller id stays, since answers take their time
_PURPOSE = "twin"


class Presence(msgspec.Struct, frozen=True):
    """A process's own word."""

    age: Amount  # seconds since it started, or since this computer last woke up
    signature: Annotated[bytes, msgspec.Meta(max_length=64)]  # over its boot id, that of the other, and the age

    @classmethod
    def sign(cls, identity: Identity, boot_id: bytes, other: bytes, age: float) -> Presence:
        return cls(age, identity.sign(_PURPOSE, boot_id, other, struct.pack(">d", age)))

    def is_of(self, peer: PeerID, boot_id: bytes, other: bytes) -> bool:
        """Whether the process with this boot id has said it of the `other`."""
        signed = boot_id, other, struct.pack(">d", self.age)
        return boot_id != other and verify(peer, _PURPOSE, self.signature, *signed)


class TwinSeen(msgspec.Struct, frozen=True):
    """Another process greets the sender with the receiver's key. It is answered by the receiver's `Presence`."""

    boot_id: BootID
    address: Words  # where the sender sees it
    presence: Presence | None = None  # its word, once there is one


def was_first(age: float, boot_id: bytes, than_age: float, than: bytes) -> bool:
    """Whether a process stays, and the other one goes. An age that was signed a while ago is too small, so of two
    processes that judge each other at most one goes."""
    if abs(age - than_age) <= TOGETHER:
        return boot_id < than
    return age > than_age
