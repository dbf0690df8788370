"""The ticket that a link carries for a closed run (`/invite=…`), and that a peer keeps until it is a member.

A ticket for a bearer holds a private key: whoever has it can use the invitation. Nothing shows it but the link itself.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from swarmcli.errors import AddressError
from swarmcli.network.identity import PEER_ID_BYTES, Identity, PeerID
from swarmcli.network.membership import INVITATION_BYTES, ClosedRun, Invitation, InvitationKind, Pass, claimed

_VERSION = b"\x01"


@dataclass(frozen=True, slots=True)
class Ticket:
    """An invitation on its way to a peer. `repr` shows no secret."""

    run_key: PeerID
    invitation: Invitation
    secret: bytes = field(default=b"", repr=False)  # the private half of a bearer's invitation

    @classmethod
    def for_bearer(cls, run_key: PeerID, invitation: Invitation, bearer: Identity) -> Ticket:
        secret = bearer.private_key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
        return cls(run_key, invitation, secret)

    @classmethod
    def parse(cls, text: str) -> Ticket:
        """Reads a ticket. Raises AddressError, in words without the text: they may end up in a log."""
        try:
            if len(text) > 320 or not text.isascii():
                raise ValueError
            data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
            if data[:1] != _VERSION:
                raise ValueError
            head = 1 + PEER_ID_BYTES
            invitation = Invitation.decode(data[head : head + INVITATION_BYTES])
            secret = data[head + INVITATION_BYTES :]
            if len(secret) != (32 if invitation.kind is InvitationKind.BEARER else 0):
                raise ValueError
            return cls(PeerID(data[1:head]), invitation, secret)
        except (ValueError, binascii.Error):
            raise AddressError(
                "the invitation of the link cannot be read; copy all of the link, or ask for another one"
            ) from None

    def encode(self) -> str:
        """Returns the text that `parse` reads."""
        data = _VERSION + self.run_key + self.invitation.encode() + self.secret
        return base64.urlsafe_b64encode(data).decode().rstrip("=")

    def run(self, recipe: str) -> ClosedRun:
        """Returns the closed run that this invites to. `recipe`: the fingerprint of the link."""
        return ClosedRun(self.run_key, recipe)

    @property
    def bearer(self) -> Identity | None:
        """The key of a bearer's invitation; None: the invitation is for one peer."""
        return Identity(Ed25519PrivateKey.from_private_bytes(self.secret)) if self.secret else None

    def card(self, recipe: str, peer: PeerID) -> Pass:
        """Returns the pass that this peer shows with the invitation."""
        bearer = self.bearer
        return claimed(self.run(recipe), self.invitation, bearer, peer) if bearer else Pass(self.invitation)
