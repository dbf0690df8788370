"""The files by which a peer is a member of a closed run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmcli.errors import IdentityError, MembershipError
from swarmcli.network.identity import Identity
from swarmcli.network.membership import InvitationKind, Membership
from swarmcli.owner.invitations import INVITATION, MEMBERSHIP, keep_ticket, key_file, membership_of, of_recipe, visiting
from swarmcli.peer.linked import LinkedRun
from swarmcli.recipe import Link, Recipe, digest_of
from swarmcli.recipe.run_key import RunKey
from swarmcli.recipe.ticket import Ticket
from tests.recipe.recipes import small

NOW, LATER = 1_000_000.0, 1_100_000
PEER, HOST = Identity.from_seed(1), Identity.from_seed(2)


@pytest.fixture
def key(tmp_path: Path) -> RunKey:
    return RunKey.create(tmp_path / "owner" / "small.run-key")


@pytest.fixture
def recipe(key: RunKey, tmp_path: Path) -> Iterator[Recipe]:
    (tmp_path / "home").mkdir()
    yield small("access=invite", f"run_key={key.public}", directory=tmp_path)


def ticket_of(key: RunKey, recipe: Recipe, until: int = LATER) -> Ticket:
    return Ticket.for_bearer(key.public, *key.invite_bearer(digest_of(recipe), HOST.peer_id, until))


def membership(recipe: Recipe, now: float = NOW, identity: Identity = PEER) -> Membership | None:
    return membership_of(recipe, recipe.directory / "home", identity, lambda: now)


def test_an_open_run_asks_for_nothing_and_a_closed_one_names_whom_to_ask(recipe: Recipe) -> None:
    assert membership(small(directory=recipe.directory)) is None
    with pytest.raises(MembershipError, match=r"run small is closed.*no invitation; ask its owner.*swarm invite"):
        membership(recipe)


def test_a_links_invitation_is_kept_in_the_home_readable_by_this_user_alone(key: RunKey, recipe: Recipe) -> None:
    keep_ticket(recipe.directory, ticket_of(key, recipe))
    first = membership(recipe)
    (recipe.directory / INVITATION).unlink()
    again = membership(recipe)
    assert first is not None and again is not None and first.remembered.card == again.remembered.card
    assert (recipe.directory / "home" / MEMBERSHIP).stat().st_mode & 0o777 == 0o600
    with pytest.raises(MembershipError, match="no invitation"):
        membership(recipe, identity=HOST)  # another identity in that home
    with pytest.raises(MembershipError, match=r"invitation has ended.*clock"):
        membership(recipe, now=LATER)


def test_an_agreed_link_leaves_its_invitation_in_the_data_directory(
    key: RunKey, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_DATA_DIR", str(recipe.directory / "data"))
    ticket = ticket_of(key, recipe)
    run = LinkedRun(Link(HOST.peer_id, ("203.0.113.7:1",), "small", digest_of(recipe), ticket))
    run.keep("trainer", "recipe")
    run.keep_invitation(ticket)
    assert (run.path / INVITATION).stat().st_mode & 0o777 == 0o600
    assert [file for file in run.path.rglob("*") if file.is_file() and ticket.encode() in file.read_text()] == [
        run.path / INVITATION
    ]
    (run.path / INVITATION).write_text("damaged")
    with pytest.raises(IdentityError, match="join by the link again"):
        membership(small("access=invite", f"run_key={key.public}", directory=run.path))


def test_of_two_invitations_the_one_that_holds_longer_is_shown(key: RunKey, recipe: Recipe) -> None:
    for until in (LATER, LATER + 5, LATER - 5):
        keep_ticket(recipe.directory, ticket_of(key, recipe, until))
        found = membership(recipe)
    assert found is not None and found.remembered.card is not None
    assert found.remembered.card.invitation.until == LATER + 5


def test_beside_the_run_key_a_peer_invites_itself(key: RunKey, recipe: Recipe, tmp_path: Path) -> None:
    RunKey.create(key_file(recipe))
    with pytest.raises(MembershipError, match="is not the key of this run"):
        membership(recipe)
    (tmp_path / "owner" / "small.run-key").replace(key_file(recipe))
    found = membership(recipe)
    assert found is not None and found.remembered.card is not None
    assert found.remembered.card.invitation.kind is InvitationKind.PEER
    key_file(recipe).chmod(0o640)
    with pytest.raises(IdentityError, match="chmod 600"):
        membership(recipe)


def test_revocations_and_bindings_outlive_a_restart_and_a_revoked_peer_does_not_begin(
    key: RunKey, recipe: Recipe
) -> None:
    keep_ticket(recipe.directory, ticket_of(key, recipe))
    first = membership(recipe)
    assert first is not None and first.remembered.card is not None
    other, digest = Identity.from_seed(7).peer_id, digest_of(recipe)
    first.remembered.bound[bytes(8)] = other
    first.learn([key.revoke(digest, other)])
    again = membership(recipe)
    assert again is not None and again.remembered.bound == {bytes(8): other} and other in again.remembered.revoked
    again.learn([key.revoke(digest, first.remembered.card.invitation.id)])
    with pytest.raises(
        MembershipError, match="revoked this peer's invitation"
    ):  # that one does not count; another one would
        membership(recipe)
    again.learn([key.revoke(digest, PEER.peer_id)])
    keep_ticket(recipe.directory, ticket_of(key, recipe))
    with pytest.raises(MembershipError, match="has revoked this peer"):
        membership(recipe)
    changed = small("access=invite", f"run_key={key.public}", "seed=7", directory=recipe.directory)
    keep_ticket(recipe.directory, ticket_of(key, changed))
    found = membership(changed)
    assert found is not None and not found.remembered.revoked, "those of the recipe as it was are not told on"
    for content in ("", "{}", '{"pass": "x", "bound": {}, "revoked": {}}', "[]", '{"pass": 1}'):
        (recipe.directory / "home" / MEMBERSHIP).write_text(content)
        with pytest.raises(MembershipError, match=r"is damaged.*backup"):  # instead of forgetting what it bound
            membership(recipe)


def test_a_closed_run_is_looked_at_by_the_key_of_its_owner_or_as_a_peer_that_does_not_run(
    key: RunKey, recipe: Recipe, tmp_path: Path
) -> None:
    recipe = small("access=invite", f"run_key={key.public}", f"output_dir={tmp_path / 'runs'}", directory=tmp_path)
    with pytest.raises(MembershipError, match="nobody here can look"):
        of_recipe(recipe)
    home = tmp_path / "runs" / "small" / "trainer-1"
    identity = Identity.load_or_create(home / "identity.key")
    keep_ticket(tmp_path, ticket_of(key, recipe, 4_000_000_000))
    membership_of(recipe, home, identity, lambda: NOW)
    with pytest.raises(MembershipError, match="in use"):
        of_recipe(recipe)
    identity.close()
    found = of_recipe(recipe)
    found.identity.close()
    assert found.identity.peer_id == identity.peer_id
    (tmp_path / "owner" / "small.run-key").replace(key_file(recipe))
    before = sorted(tmp_path.rglob("*"))
    assert of_recipe(recipe).identity.peer_id not in (identity.peer_id, key.public)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_invitation_for_one_peer_is_looked_at_with_its_identity(key: RunKey, recipe: Recipe, tmp_path: Path) -> None:
    digest = digest_of(recipe)
    home = tmp_path / "small" / "trainer-1"
    identity = Identity.load_or_create(home / "identity.key")
    identity.close()
    ticket = Ticket(key.public, key.invite(digest, identity.peer_id, LATER).invitation)
    found = visiting(ticket, digest, tmp_path / "small")
    found.identity.close()
    assert found.identity.peer_id == identity.peer_id
    assert found.membership.remembered.card == ticket.card(digest, identity.peer_id)
    with pytest.raises(MembershipError, match=r"is for the peer .* without --for"):
        visiting(ticket, digest, tmp_path / "elsewhere")
