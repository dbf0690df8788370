"""Who is a member of a closed run: each way to show something that is not one's own, or holds no more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmcli.errors import NotAMember
from swarmcli.network.identity import Identity
from swarmcli.network.membership import (
    CLOSED,
    InvitationKind,
    Pass,
    claimed,
)
from tests.network.closed_runs import TONIGHT, ClosedRunWorld, meet

RULES = {
    "no invitation": "this run is closed: ask its owner",
    "foreign invitation": "another peer's; ask|claimed by another peer|is bound to another peer",
    "unbound invitation": "has to be shown to .* first",
    "bound invitation": "is bound to another peer",
    "invitation ended": "has ended; ask the owner",
    "revoked": "has revoked the invitation",
}


def refused(rule: str) -> pytest.RaisesExc[NotAMember]:
    return pytest.raises(NotAMember, match=RULES[rule])


def test_who_shows_nothing_learns_that_the_run_is_closed_and_no_more() -> None:
    world, foreign = ClosedRunWorld(), ClosedRunWorld("b" * 32)
    listener = world.member(1)
    nobody = Identity.from_seed(9).peer_id
    for proof in (b"", b"x" * 145, b"x" * 400, foreign.member(9).proof(listener._identity.peer_id)):
        with refused("no invitation") as caught:
            listener.check(nobody, proof)
        assert str(caught.value) == CLOSED
    assert not listener.admitted


def test_an_invitation_that_another_peer_copied_is_worth_nothing_to_it() -> None:
    world = ClosedRunWorld()
    member, listener = world.member(1), world.member(2)
    thief = Identity.from_seed(3).peer_id
    with refused("foreign invitation"):
        listener.check(thief, member.proof(thief))
    (bearer,) = world.bearers(listener._identity.peer_id, 4)
    for _ in range(2):  # before it is bound, and when it is
        with refused("foreign invitation"):
            listener.check(thief, bearer.proof(thief))
        meet(bearer, listener)


def test_a_bearers_invitation_is_bound_to_whom_its_host_sees_first() -> None:
    world = ClosedRunWorld()
    host, other = world.member(1), world.member(2)
    first, second = world.bearers(host._identity.peer_id, 3, 4)
    with refused("unbound invitation"):
        meet(first, other)
    meet(first, host)
    meet(first, other)  # which takes the host's word for it
    meet(other, first)
    for listener, rule in ((host, "bound invitation"), (other, "unbound invitation")):
        with refused(rule):
            meet(second, listener)
    bound, stolen = first.remembered.card, second.remembered.card
    assert bound is not None and stolen is not None
    with refused("foreign invitation"):
        other.check(second._identity.peer_id, replace(stolen, binding=bound.binding).encode())


def test_a_host_that_is_started_anew_still_knows_whom_it_bound() -> None:
    world = ClosedRunWorld()
    host = world.member(1)
    first, second = world.bearers(host._identity.peer_id, 3, 4)
    saved: list[int] = []
    host.remembered.save = lambda: saved.append(len(host.remembered.bound))
    first.remembered.card, unbound = first.remembered.card, first.remembered.card
    meet(first, host)
    assert saved == [1], "on the disk before the answer"
    host = world.membership(host._identity, host.remembered.card, bound=host.remembered.bound)
    with refused("bound invitation"):
        meet(second, host)
    first.remembered.card = unbound  # the answer was lost: it gets it again
    meet(first, host)
    assert first.remembered.card is not None and first.remembered.card.binding


def test_a_host_that_cannot_write_binds_nobody_and_revocations_hold_all_the_same() -> None:
    world = ClosedRunWorld()
    host = world.member(1)
    first, second = world.bearers(host._identity.peer_id, 3, 4)

    def full() -> None:
        raise OSError(28, "No space left on device")

    host.remembered.save = full
    for _ in range(2):
        with pytest.raises(NotAMember, match="cannot write just now"):
            meet(first, host)
    assert not host.remembered.bound
    mallory = world.member(9)
    meet(mallory, host)
    revocation = world.key.revoke(world.run.recipe, mallory._identity.peer_id)
    assert host.learn([revocation]) == [revocation] and host.objection(mallory._identity.peer_id)
    host.remembered.save = lambda: None
    meet(second, host)


def test_a_host_cannot_invite_anybody_by_itself() -> None:
    world = ClosedRunWorld()
    host, other = world.member(1), world.member(2)
    (bearer,) = world.bearers(host._identity.peer_id, 3)
    meet(bearer, host)
    friend, card = Identity.from_seed(4).peer_id, bearer.remembered.card
    assert card is not None
    binding = host._identity.sign("invitation binding", *host._bound_fields(friend, card.invitation))
    with refused("foreign invitation"):
        other.check(friend, replace(card, binding=binding).encode())


def test_the_key_of_a_link_only_looks_and_only_at_the_host_until_it_is_taken_up() -> None:
    world = ClosedRunWorld()
    host, other = world.member(1), world.member(2)
    invitation, key = world.key.invite_bearer(world.recipe, host._identity.peer_id, TONIGHT)
    visitor = world.membership(key, claimed(world.run, invitation, key, key.peer_id))
    meet(visitor, host)
    assert host.objection(key.peer_id) == "" and not host.remembered.bound
    with refused("unbound invitation"):
        meet(visitor, other)
    taken_up = world.membership(Identity.from_seed(3))
    taken_up.remembered.card = claimed(world.run, invitation, key, taken_up._identity.peer_id)
    meet(taken_up, host)
    assert "taken up" in host.objection(key.peer_id)
    with refused("bound invitation"):
        meet(visitor, host)


def test_an_ended_invitation_opens_nothing_and_ends_what_it_opened() -> None:
    world = ClosedRunWorld()
    member, listener = world.member(1), world.member(2, until=TONIGHT + 9)
    meet(member, listener)
    world.clock.time = TONIGHT
    assert "has ended" in listener.objection(member._identity.peer_id)
    with pytest.raises(NotAMember, match=r"has ended.*swarm invite.*clock"):
        meet(member, listener)


@pytest.mark.parametrize("what", ["the peer", "the invitation"])
def test_who_is_revoked_is_out_whoever_dials(what: str) -> None:
    world = ClosedRunWorld()
    member, listener = world.member(1), world.member(2)
    meet(member, listener)
    card, peer = member.remembered.card, member._identity.peer_id
    assert card is not None
    revocation = world.key.revoke(world.recipe, peer if what == "the peer" else card.invitation.id)
    assert listener.learn([revocation]) == [revocation] and listener.learn([revocation]) == []
    assert (
        "revoked" in listener.objection(peer)
        and listener.is_out(peer)
        and not member.is_out(listener._identity.peer_id)
    )
    for dialer, other in ((member, listener), (listener, member)):
        with refused("revoked"):
            meet(dialer, other)
    member.learn([revocation])
    assert member.is_revoked and not listener.is_revoked


def test_a_revocation_that_the_owner_has_not_signed_stops_the_reading_of_its_message() -> None:
    world, foreign = ClosedRunWorld(), ClosedRunWorld("b" * 32)
    listener, good = world.member(1), world.key.revoke(world.recipe, bytes(8))
    bad = foreign.key.revoke(foreign.recipe, bytes(32))  # the same owner's, of another run
    with pytest.raises(ValueError, match="has not signed"):
        listener.learn([good, bad, world.key.revoke(world.recipe, b"8" * 8)])
    assert list(listener.remembered.revoked) == [good.subject]


def test_what_is_signed_for_one_purpose_passes_for_no_other() -> None:
    world = ClosedRunWorld()
    card = world.member(1).remembered.card
    assert card is not None and Pass.decode(card.encode()) == card
    changed = replace(card.invitation, until=TONIGHT + 1)
    assert card.invitation.is_genuine(world.run) and not changed.is_genuine(world.run)
    assert not replace(card.invitation, kind=InvitationKind.BEARER).is_genuine(world.run)
    assert not card.invitation.is_genuine(world.key.run("b" * 32)), "it invites to one recipe"
