"""The run key: with it the owner of a run signs who may take part, and which state is the run's.

Its public half stands in the recipe (`run_key`), so it is part of the fingerprint and every peer knows it. The file
stays with the owner; no peer needs it to run. Each signature is for one purpose and covers the recipe's fingerprint: an
invitation to one run is none to another with the same key, and nobody can exchange the run that it invites to.
"""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmcli.errors import IdentityError
from swarmcli.network.identity import Identity, PeerID, verify
from swarmcli.network.key_file import create_key_file, read_key_file
from swarmcli.network.membership import ID_BYTES, ClosedRun, Invitation, InvitationKind, Pass, Revocation

_WHAT = "run key"


class RunKey:
    """An Ed25519 key with the purposes for which it signs. `repr` shows the public half only."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._key = Identity(private_key)

    @classmethod
    def create(cls, path: Path) -> RunKey:
        """Writes a new key (mode 0600). Raises IdentityError, also when the file exists: a run whose key is replaced
        has no owner any more."""
        try:
            if path.exists():
                raise IdentityError(f"the {_WHAT} {path} is there already; use it, or name another file")
            create_key_file(path)
        except OSError as error:
            raise IdentityError(f"the {_WHAT} {path} cannot be written: {error.strerror or error}") from error
        return cls.load(path)

    @classmethod
    def load(cls, path: Path) -> RunKey:
        """Reads a key. Raises IdentityError that names file and fix: missing, another user's, readable by others, no
        key."""
        try:
            return cls(read_key_file(path, _WHAT, "restore your copy of it: a new key would not be this run's"))
        except FileNotFoundError:
            raise IdentityError(
                f"there is no {_WHAT} at {path}; it stays with the run's owner, who made it with `swarm init`: name "
                "its file with --run-key"
            ) from None
        except OSError as error:
            raise IdentityError(f"the {_WHAT} {path} cannot be read: {error.strerror or error}") from error

    @property
    def public(self) -> PeerID:
        """The public half, which stands in the recipe as 52 characters."""
        return self._key.peer_id

    def run(self, recipe: str) -> ClosedRun:
        """Returns the closed run of this key. `recipe`: its fingerprint, as links carry it."""
        return ClosedRun(self.public, recipe)

    def invite(self, recipe: str, peer: PeerID, until: int) -> Pass:
        """Returns an invitation for one peer, which can show it as it is. `until`: seconds since 1970."""
        return Pass(self._invitation(recipe, InvitationKind.PEER, until, peer, peer))

    def invite_bearer(self, recipe: str, host: PeerID, until: int) -> tuple[Invitation, Identity]:
        """Returns an invitation for the first peer that shows it to `host`, and the key that goes with it. The bearer
        needs both; they are a secret."""
        bearer = Identity.generate()
        return self._invitation(recipe, InvitationKind.BEARER, until, bearer.peer_id, host), bearer

    def revoke(self, recipe: str, subject: bytes) -> Revocation:
        """Signs that a peer is no member any more. `subject`: a peer id, or the id of an invitation."""
        return Revocation(bytes(subject), self._key.sign("run revocation", recipe.encode(), subject))

    def sign_position(self, recipe: str, epoch: int, samples: int, lineage: bytes, state: bytes) -> bytes:
        """Signs that the run is at this position, with a state of this hash. See `is_owners_position`."""
        return self._key.sign("run position", *_position_fields(recipe, epoch, samples, lineage, state))

    def _invitation(self, recipe: str, kind: InvitationKind, until: int, holder: PeerID, host: PeerID) -> Invitation:
        unsigned = Invitation(kind, os.urandom(ID_BYTES), until, holder, host)
        signature = self._key.sign("run invitation", recipe.encode(), unsigned.head())
        return Invitation(kind, unsigned.id, until, holder, host, signature)

    def __repr__(self) -> str:
        return f"RunKey({self.public.short!r})"


def is_owners_position(
    run_key: PeerID, signature: bytes, recipe: str, epoch: int, samples: int, lineage: bytes, state: bytes
) -> bool:
    """Whether the owner has signed exactly this position of the run with this recipe (by its fingerprint)."""
    return verify(run_key, "run position", signature, *_position_fields(recipe, epoch, samples, lineage, state))


def _position_fields(recipe: str, epoch: int, samples: int, lineage: bytes, state: bytes) -> tuple[bytes, ...]:
    return (recipe.encode(), epoch.to_bytes(8, "big"), samples.to_bytes(16, "big"), lineage, state)
