"""Lies about who is a member of a closed run. In an open run there is nothing to lie about, and they say nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from swarmcli.errors import NotAMember
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.membership import Invitation, InvitationKind, Membership, Pass, Revocation
from tests.adversary.lies.base import Liar, lie

CENTURY = 100 * 365 * 86_400


def _lie(
    name: str, *, at_most: str
) -> Callable[[Callable[[Liar, Membership, Pass], None]], Callable[[Liar, Membership, Pass], None]]:
    """Of a member of a closed run, who has its own pass."""

    def enter(tell: Callable[[Liar, Membership, Pass], None]) -> Callable[[Liar, Membership, Pass], None]:
        @lie(name, "membership", at_most=at_most)
        def tell_as_member(liar: Liar) -> None:
            membership = liar.endpoint.membership
            if membership is not None and membership.remembered.card is not None:
                tell(liar, membership, membership.remembered.card)

        return tell

    return enter


def _show(liar: Liar, membership: Membership, card: Pass | bytes, what: str) -> None:
    """From now on it shows this to everybody."""
    shown = card if isinstance(card, bytes) else card.encode()

    def proof(for_peer: PeerID) -> bytes:
        liar.told.append(what)
        return shown

    membership.proof = proof  # type: ignore[method-assign]


@_lie("no invitation at all", at_most="it gets a refusal, and nobody is connected with it")
def show_nothing(liar: Liar, membership: Membership, own: Pass) -> None:
    _show(liar, membership, b"", "nothing")


@_lie("garbage for an invitation", at_most="it gets a refusal, for one signature that is checked at most")
def show_garbage(liar: Liar, membership: Membership, own: Pass) -> None:
    _show(liar, membership, liar.random.randbytes(liar.random.randrange(300)), "garbage")


@_lie("an invitation of its own making", at_most="it gets a refusal: another key than the run's signed it")
def forge(liar: Liar, membership: Membership, own: Pass) -> None:
    key, me = Identity.from_seed(liar.random.randbytes(8)), liar.endpoint.peer_id
    unsigned = Invitation(InvitationKind.PEER, liar.random.randbytes(8), CENTURY, me, me)
    signature = key.sign("run invitation", membership.run.recipe.encode(), unsigned.head())
    _show(liar, membership, Pass(dataclasses.replace(unsigned, signature=signature)), "a forgery")


@_lie("a later end", at_most="it gets a refusal: the end is signed")
def prolong(liar: Liar, membership: Membership, own: Pass) -> None:
    longer = dataclasses.replace(own.invitation, until=own.invitation.until + CENTURY)
    _show(liar, membership, dataclasses.replace(own, invitation=longer), "a later end")


@_lie("a copied invitation", at_most="it gets a refusal: the invitation names its holder")
def copy(liar: Liar, membership: Membership, own: Pass) -> None:
    """What a member has shown to it, it shows to all others."""
    if membership.admitted:
        _show(liar, membership, Pass(liar.random.choice(list(membership.admitted.values()))), "a copy")


@_lie("an open door", at_most="it is connected with strangers itself; no other member is, through it or not")
def let_everybody_in(liar: Liar, membership: Membership, own: Pass) -> None:
    check = membership.check

    def shrug(peer: PeerID, proof: bytes) -> bytes:
        try:
            return check(peer, proof)
        except NotAMember:
            liar.told.append(f"let {peer.short} in")
            return b""

    membership.check = shrug  # type: ignore[method-assign]
    membership.objection = lambda peer: ""  # type: ignore[method-assign]


@_lie("a host that binds to everybody", at_most="a link that was passed on lets in all who have it, and nobody else")
def bind_again(liar: Liar, membership: Membership, own: Pass) -> None:
    check = membership.check

    def forget(peer: PeerID, proof: bytes) -> bytes:
        membership.remembered.bound.clear()
        liar.told.append("bound again")
        return check(peer, proof)

    membership.check = forget  # type: ignore[method-assign]


@_lie("revocations of honest peers", at_most="its message is refused at the first false signature")
def invent_revocations(liar: Liar, membership: Membership, own: Pass) -> None:
    """It knows of false ones, and tells them to whomever it tells anything."""
    key = Identity.from_seed(liar.random.randbytes(8))
    for peer in (*membership.admitted, PeerID(liar.random.randbytes(32))):
        signature = key.sign("run revocation", membership.run.recipe.encode(), peer)
        membership.remembered.revoked[peer] = Revocation(bytes(peer), signature)
        liar.told.append(f"revoked {peer.short}")
    membership.objection = lambda peer: ""  # type: ignore[method-assign]


@_lie("deaf to revocations", at_most="the others hang up on whom the owner has revoked, this peer included")
def ignore_revocations(liar: Liar, membership: Membership, own: Pass) -> None:
    def ignore(revocations: Iterable[Revocation]) -> list[Revocation]:
        liar.told.append("heard nothing")
        return []

    membership.learn = ignore  # type: ignore[method-assign]
