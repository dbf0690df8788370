"""Lies about who is a member of a closed run. In an open run there is nothing to lie about, and they say nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from swarmcli.errors import NotAMember
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.membership import Invitation, InvitationKind, Membership, Pass, Revocation
from tests.adversary.lies.base import Liar, lie

CENTURY = 100 * 365 * 86_400


def _shows(liar: Liar, card: Pass | bytes, what: str) -> None:
    """From now on it shows this to everybody."""
    membership = liar.endpoint.membership
    if membership is None:
        return
    shown = card if isinstance(card, bytes) else card.encode()

    def proof(for_peer: PeerID) -> bytes:
        liar.told.append(what)
        return shown

    membership.proof = proof  # type: ignore[method-assign]


def _own(liar: Liar) -> tuple[Membership, Pass] | None:
    membership = liar.endpoint.membership
    if membership is None or membership.remembered.card is None:
        return None
    return membership, membership.remembered.card


@lie("no invitation at all", "membership", at_most="it gets a refusal, and nobody is connected with it")
def show_nothing(liar: Liar) -> None:
    _shows(liar, b"", "nothing")


@lie("garbage for an invitation", "membership", at_most="it gets a refusal, for one signature that is checked at most")
def show_garbage(liar: Liar) -> None:
    _shows(liar, liar.random.randbytes(liar.random.randrange(300)), "garbage")


@lie("an invitation of its own making", "membership", at_most="it gets a refusal: another key than the run's signed it")
def forge(liar: Liar) -> None:
    if (own := _own(liar)) is not None:
        membership, _ = own
        key = Identity.from_seed(liar.random.randbytes(8))
        unsigned = Invitation(
            InvitationKind.PEER, liar.random.randbytes(8), CENTURY, liar.endpoint.peer_id, liar.endpoint.peer_id
        )
        signature = key.sign("run invitation", membership.run.recipe.encode(), unsigned.head())
        _shows(liar, Pass(dataclasses.replace(unsigned, signature=signature)), "a forgery")


@lie("a later end", "membership", at_most="it gets a refusal: the end is signed")
def prolong(liar: Liar) -> None:
    if (own := _own(liar)) is not None:
        _, card = own
        longer = dataclasses.replace(card.invitation, until=card.invitation.until + CENTURY)
        _shows(liar, dataclasses.replace(card, invitation=longer), "a later end")


@lie("a copied invitation", "membership", at_most="it gets a refusal: the invitation names its holder")
def copy(liar: Liar) -> None:
    """What a member has shown to it, it shows to all others."""
    membership = liar.endpoint.membership
    if membership is not None and membership.admitted:
        _shows(liar, Pass(liar.random.choice(list(membership.admitted.values()))), "a copy")


@lie(
    "an open door", "membership", at_most="it is connected with strangers itself; no other member is, through it or not"
)
def let_everybody_in(liar: Liar) -> None:
    membership = liar.endpoint.membership
    if membership is None:
        return
    check = membership.check

    def shrug(peer: PeerID, proof: bytes) -> bytes:
        try:
            return check(peer, proof)
        except NotAMember:
            liar.told.append(f"let {peer.short} in")
            return b""

    membership.check = shrug  # type: ignore[method-assign]
    membership.objection = lambda peer: ""  # type: ignore[method-assign]


@lie(
    "a host that binds to everybody",
    "membership",
    at_most="a link that was passed on lets in all who have it, and nobody else",
)
def bind_again(liar: Liar) -> None:
    if (own := _own(liar)) is not None:
        membership, _ = own
        check = membership.check

        def forget(peer: PeerID, proof: bytes) -> bytes:
            membership.remembered.bound.clear()
            liar.told.append("bound again")
            return check(peer, proof)

        membership.check = forget  # type: ignore[method-assign]


@lie("revocations of honest peers", "membership", at_most="its message is refused at the first false signature")
def invent_revocations(liar: Liar) -> None:
    """It knows of false ones, and tells them to whomever it tells anything."""
    if (own := _own(liar)) is not None:
        membership, _ = own
        key = Identity.from_seed(liar.random.randbytes(8))
        for peer in (*membership.admitted, PeerID(liar.random.randbytes(32))):
            signature = key.sign("run revocation", membership.run.recipe.encode(), peer)
            membership.remembered.revoked[peer] = Revocation(bytes(peer), signature)
            liar.told.append(f"revoked {peer.short}")
        membership.objection = lambda peer: ""  # type: ignore[method-assign]


@lie(
    "deaf to revocations", "membership", at_most="the others hang up on whom the owner has revoked, this peer included"
)
def ignore_revocations(liar: Liar) -> None:
    membership = liar.endpoint.membership
    if membership is None:
        return

    def ignore(revocations: Iterable[Revocation]) -> list[Revocation]:
        liar.told.append("heard nothing")
        return []

    membership.learn = ignore  # type: ignore[method-assign]
