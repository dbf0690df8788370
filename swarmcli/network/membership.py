"""Closed runs: who is a member. Both ends of a connection prove it in the greeting.

    run key ── signs ──▶ Invitation ── for a peer id, or for the bearer ──▶ Pass ── shown in each greeting
            └─ signs ──▶ Revocation ── of a peer id, or of an invitation

An invitation holds for one recipe and has an end. One *for a peer* is worth nothing to any other peer, since the
greeting proves who shows it. One *for the bearer* comes with a key of its own, which stays in the link: with it the
bearer signs its peer id (the *claim*), so whoever sees a pass can do nothing with it. A link may be passed on, so a
claim is not enough: the invitation names a *host*, the peer of the link. The host countersigns the first claim that it
sees (the *binding*), and no other. From then on the pass holds everywhere, whether the host runs or not.

No I/O here, and no clock: `Membership` is told both.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Annotated

import msgspec

from swarmcli.errors import NotAMember
from swarmcli.network.identity import PEER_ID_BYTES, SIGNATURE_BYTES, Identity, PeerID, verify

logger = logging.getLogger(__name__)

ID_BYTES = 8  # of an invitation: drawn by lot, so that two invitations of one owner differ
_HEAD = struct.Struct(f"!B{ID_BYTES}sQ{PEER_ID_BYTES}s{PEER_ID_BYTES}s")
INVITATION_BYTES = _HEAD.size + SIGNATURE_BYTES
MAX_PROOF = INVITATION_BYTES + 2 * SIGNATURE_BYTES  # bytes of a pass
MAX_REVOCATIONS = 10_000  # that a peer keeps; the owner has signed all of them

MAX_ADMITTED = 4096  # members whose invitations this peer remembers; more only while they are connected

CLOSED = "this run is closed: ask its owner for an invitation (`swarm invite`)"
NO_MEMBER = "the peer there is no member of this closed run"
BOUND = (
    "this invitation is bound to another peer, perhaps to one that runs on this computer already: each peer needs its "
    "own; ask for another one"
)


class InvitationKind(IntEnum):
    PEER = 1  # for one peer id
    BEARER = 2  # for the first peer that shows it


@dataclass(frozen=True, slots=True)
class ClosedRun:
    """What invitations are for: the public run key, and the recipe by its fingerprint."""

    key: PeerID
    recipe: str


@dataclass(frozen=True, slots=True)
class Invitation:
    """`signature` is the run key's, over all other fields and the recipe."""

    kind: InvitationKind
    id: bytes
    until: int  # seconds since 1970; from then on it holds no more
    holder: PeerID  # the peer; of a bearer's invitation its public key
    host: PeerID  # who countersigns a bearer's claim; of an invitation for a peer, that peer
    signature: bytes = b""

    def head(self) -> bytes:
        return _HEAD.pack(self.kind, self.id, self.until, self.holder, self.host)

    def encode(self) -> bytes:
        return self.head() + self.signature

    @classmethod
    def decode(cls, data: bytes) -> Invitation:
        """Raises ValueError."""
        if len(data) != INVITATION_BYTES:
            raise ValueError(f"an invitation has {INVITATION_BYTES} bytes, got {len(data)}")
        kind, number, until, holder, host = _HEAD.unpack(data[: _HEAD.size])
        return cls(InvitationKind(kind), number, until, PeerID(holder), PeerID(host), data[_HEAD.size :])

    def is_genuine(self, run: ClosedRun) -> bool:
        return verify(run.key, "run invitation", self.signature, run.recipe.encode(), self.head())


@dataclass(frozen=True, slots=True)
class Pass:
    """What a peer shows: an invitation, and for a bearer's the signatures that tie it to this peer."""

    invitation: Invitation
    claim: bytes = b""
    binding: bytes = b""

    def encode(self) -> bytes:
        return self.invitation.encode() + self.claim + self.binding

    @classmethod
    def decode(cls, data: bytes) -> Pass:
        """Raises ValueError."""
        head, rest = data[:INVITATION_BYTES], data[INVITATION_BYTES:]
        if len(rest) not in (0, SIGNATURE_BYTES, 2 * SIGNATURE_BYTES):
            raise ValueError("what is shown ends in the middle of a signature")
        return cls(Invitation.decode(head), rest[:SIGNATURE_BYTES], rest[SIGNATURE_BYTES:])

    def is_claimed_by(self, peer: PeerID, run: ClosedRun) -> bool:
        """Whether somebody who has the key of this bearer's invitation has claimed it for this peer."""
        invitation = self.invitation
        return verify(invitation.holder, "invitation claim", self.claim, run.recipe.encode(), invitation.id, peer)


class Revocation(msgspec.Struct, frozen=True):
    """The owner's word that a peer (32 bytes), or whoever shows an invitation (8 bytes), is no member any more."""

    subject: Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=PEER_ID_BYTES)]
    signature: Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]

    def is_genuine(self, run: ClosedRun) -> bool:
        return verify(run.key, "run revocation", self.signature, run.recipe.encode(), self.subject)


def claimed(run: ClosedRun, invitation: Invitation, bearer: Identity, peer: PeerID) -> Pass:
    """A bearer's invitation as this peer shows it. `bearer` is the key that came with it. A peer whose own key this is
    only reads the recipe, and claims nothing."""
    if peer == invitation.holder:
        return Pass(invitation)
    return Pass(invitation, bearer.sign("invitation claim", run.recipe.encode(), invitation.id, peer))


@dataclass(slots=True)
class Remembered:
    """What a member must still know after a restart. `save` is called when it has changed, and returns when it is on
    the disk: a host that forgot a binding would bind an invitation twice."""

    bound: dict[bytes, PeerID] = field(default_factory=dict)  # invitation → whom this peer, its host, has bound it to
    revoked: dict[bytes, Revocation] = field(default_factory=dict)  # by subject
    card: Pass | None = None  # this peer's own pass
    save: Callable[[], None] = lambda: None


class Membership:
    """One peer's membership of a closed run: its own pass, and whom it takes for members."""

    def __init__(self, run: ClosedRun, identity: Identity, remembered: Remembered, now: Callable[[], float]) -> None:
        """`now`: seconds since 1970, by which invitations end."""
        self.run = run
        self.remembered = remembered
        self.admitted: dict[PeerID, Invitation] = {}  # what members have shown that are connected, or were lately
        self._identity = identity
        self._now = now

    def proof(self, for_peer: PeerID) -> bytes:
        """This peer's pass, encoded; b"" if it has none. Whoever sees it can do nothing with it."""
        card = self.remembered.card
        return b"" if card is None else card.encode()

    def check(self, peer: PeerID, proof: bytes) -> bytes:
        """Raises NotAMember unless this peer, which has proved its id, is a member. Returns what this end has to tell a
        dialer: the binding, if this peer is the host of the dialer's invitation and has bound it; else b""."""
        card = self._genuine(proof)
        invitation = card.invitation
        self._check_standing(peer, invitation)
        binding = b""
        if invitation.kind is InvitationKind.PEER:
            if invitation.holder != peer:
                raise NotAMember("this invitation is another peer's; ask for one of your own")
        else:
            binding = self._check_bearer(peer, card)
        self.admitted.pop(peer, None)  # so that the newest stand last
        self.admitted[peer] = invitation
        return binding

    def welcomed(self, listener: PeerID, proof: bytes, binding: bytes) -> None:
        """The dialer's side of the greeting: the listener's pass, and this peer's own binding. Raises NotAMember."""
        try:
            self.check(listener, proof)
        except NotAMember as error:
            raise NotAMember(f"{NO_MEMBER}: {error}" if proof else NO_MEMBER) from None
        card = self.remembered.card
        if not binding or card is None or card.binding:
            return
        bound = replace(card, binding=binding)
        if listener == card.invitation.host and self._is_bound(self._identity.peer_id, bound):
            self.remembered.card = bound
            self._try_to_save()

    def is_out(self, peer: PeerID) -> bool:
        """Whether a peer that was a member is none any more, as far as this peer knows."""
        return peer in self.remembered.revoked or (peer in self.admitted and bool(self.objection(peer)))

    def objection(self, peer: PeerID) -> str:
        """Why a connected peer that was admitted is no member any more; "": it still is."""
        invitation = self.admitted.get(peer)
        if invitation is None:
            return NO_MEMBER
        try:
            self._check_standing(peer, invitation)
        except NotAMember as error:
            return str(error)
        if (
            peer == invitation.holder
            and invitation.kind is InvitationKind.BEARER
            and invitation.id in self.remembered.bound
        ):
            return "the invitation has been taken up"  # the holder of the link's key only read the recipe
        return ""

    def forget_all_but(self, connected: Iterable[PeerID]) -> None:
        """Bounds what is remembered. The oldest go first: a peer admitted just now may not count as connected yet."""
        surplus = len(self.admitted) - MAX_ADMITTED
        if surplus > 0:
            kept = set(connected)
            for peer in [peer for peer in self.admitted if peer not in kept][:surplus]:
                del self.admitted[peer]

    def learn(self, revocations: Iterable[Revocation]) -> list[Revocation]:
        """Keeps those that are new, and returns them. Raises ValueError at the first that the owner has not signed, so
        that whoever invents them costs this peer no more than one verification."""
        new: list[Revocation] = []
        known = self.remembered.revoked
        try:
            for each in revocations:
                if each.subject in known or len(known) >= MAX_REVOCATIONS:
                    continue
                if not each.is_genuine(self.run):
                    raise ValueError("a revocation that the run's owner has not signed")
                known[each.subject] = each
                new.append(each)
        finally:
            if new:
                self._try_to_save()
        return new

    @property
    def is_revoked(self) -> bool:
        """Whether the owner has revoked this very peer, or its invitation."""
        card = self.remembered.card
        revoked = self.remembered.revoked
        return self._identity.peer_id in revoked or (card is not None and card.invitation.id in revoked)

    @property
    def has_ended(self) -> bool:
        """Whether this peer's own invitation has come to its end."""
        card = self.remembered.card
        return card is None or self._now() >= card.invitation.until

    def __repr__(self) -> str:
        return f"<Membership of {self._identity.peer_id.short}>"

    # Inside

    def _genuine(self, proof: bytes) -> Pass:
        """Reads a pass. A peer that shows nothing signed by the owner is told only that the run is closed."""
        try:
            card = Pass.decode(proof)
        except ValueError:
            raise NotAMember(CLOSED) from None
        if not card.invitation.is_genuine(self.run):
            raise NotAMember(CLOSED)
        return card

    def _check_standing(self, peer: PeerID, invitation: Invitation) -> None:
        revoked = self.remembered.revoked
        if peer in revoked or invitation.id in revoked:
            raise NotAMember("the owner of this run has revoked the invitation; ask the owner")
        if self._now() >= invitation.until:
            raise NotAMember(
                "the invitation has ended; ask the owner for another one (`swarm invite`), or set the clock of the "
                "computer that is wrong"
            )

    def _check_bearer(self, peer: PeerID, card: Pass) -> bytes:
        """Returns the binding if this peer is the invitation's host and the other one has none yet, else b"". Raises
        NotAMember."""
        invitation, own = card.invitation, self._identity.peer_id
        if card.binding:
            if not self._is_bound(peer, card):
                raise NotAMember(BOUND)
            return b""
        if not (peer == invitation.holder or card.is_claimed_by(peer, self.run)):
            raise NotAMember("this invitation was claimed by another peer; ask for another one")
        if own != invitation.host:
            raise NotAMember(f"the invitation has to be shown to {invitation.host.short}… first")
        bound = self.remembered.bound.get(invitation.id)
        if bound not in (None, peer):
            raise NotAMember(BOUND)
        if peer == invitation.holder:
            return b""  # it only reads the recipe, and claims nothing
        if bound is None:
            self._bind(invitation, peer)
            logger.info("bound the invitation %s to %s", invitation.id.hex(), peer.short)
        return self._identity.sign("invitation binding", *self._bound_fields(peer, invitation))

    def _bind(self, invitation: Invitation, peer: PeerID) -> None:
        """Saves before it signs: a host that forgets a binding would let in a second peer after its next start."""
        self.remembered.bound[invitation.id] = peer
        try:
            self.remembered.save()
        except OSError as error:
            del self.remembered.bound[invitation.id]
            logger.warning("the invitation %s was not bound: %s", invitation.id.hex(), error)
            raise NotAMember("the host of this invitation cannot write just now; try again later") from error

    def _try_to_save(self) -> None:
        """What cannot be written holds all the same until the next start: after it, others tell it again."""
        try:
            self.remembered.save()
        except OSError as error:
            logger.warning("what was learned of the run's members is not on the disk: %s", error)

    def _is_bound(self, peer: PeerID, card: Pass) -> bool:
        """Needs both signatures: with the host's alone it could invite anybody, and a claim can be made by everybody
        who has seen the link."""
        fields = self._bound_fields(peer, card.invitation)
        bound = verify(card.invitation.host, "invitation binding", card.binding, *fields)
        return bound and card.is_claimed_by(peer, self.run)

    def _bound_fields(self, peer: PeerID, invitation: Invitation) -> tuple[bytes, ...]:
        return (self.run.recipe.encode(), invitation.id, invitation.holder, peer)
