"""What the owner's commands note, and whom a word of theirs means."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmcli.errors import MembershipError, UsageError
from swarmcli.network.identity import Identity
from swarmcli.owner.invitations import key_file
from swarmcli.owner.visit import InvitationLedger, RunMember, load_key, subject_named
from swarmcli.recipe.run_key import RunKey
from tests.recipe.recipes import small

ADA, JOE = (Identity.from_seed(seed).peer_id for seed in (1, 2))
MEMBERS = [RunMember(ADA.text, "ada"), RunMember(JOE.text, "joe")]


@pytest.fixture
def ledger(tmp_path: Path) -> InvitationLedger:
    key = RunKey.create(tmp_path / "small.run-key")
    found = InvitationLedger.beside(tmp_path / "small.run-key")
    found.note(key.invite("a" * 32, ADA, 2_000_000_000).invitation, peer=ADA, note="for Ada")
    found.note(key.invite_bearer("a" * 32, ADA, 2_000_000_000)[0], peer=None, note="joe")
    return found


def test_the_ledger_is_read_again_and_holds_no_secret(ledger: InvitationLedger) -> None:
    ledger.revoke(JOE)
    ledger.revoke(JOE)
    again = InvitationLedger.beside(ledger.file.with_name("small.run-key"))
    assert (again.invited, again.revoked) == (ledger.invited, [JOE.hex()])
    assert ledger.file.stat().st_mode & 0o777 == 0o600
    ledger.file.write_text("[]")
    with pytest.raises(UsageError, match="cannot be read"):
        InvitationLedger.beside(ledger.file.with_name("small.run-key"))


def test_a_word_means_one_peer_or_one_invitation(ledger: InvitationLedger) -> None:
    first, second = (bytes.fromhex(each.id) for each in ledger.invited)
    for word, subject in (
        (ADA.text, ADA),
        (ADA.text[:8], ADA),
        ("joe", JOE),  # who takes part comes before the note of its invitation
        ("for Ada", first),
        (second.hex(), second),
        (second.hex()[:8], second),
    ):
        members = [RunMember(ADA.text, "ada"), RunMember(JOE.text, "joe", invitation=second.hex())]
        assert subject_named(word, ledger, members) == subject
    assert subject_named("joe", ledger, []) == second
    for word in ("", "nobody", ADA.text[:4]):
        with pytest.raises(UsageError, match="no member and no invitation"):
            subject_named(word, ledger, MEMBERS)
    with pytest.raises(UsageError, match="may mean"):
        subject_named("joe", ledger, [*MEMBERS, RunMember(ADA.text, "joe")])


def test_a_name_that_a_peer_gives_itself_hides_no_note_of_the_owner(ledger: InvitationLedger) -> None:
    """Whoever may be revoked by its note has a friend take the note as its name: the owner is asked, not fooled."""
    for friend in (RunMember(ADA.text, "joe"), RunMember(ADA.text, "joe", invitation=ledger.invited[0].id)):
        with pytest.raises(UsageError, match=f"may mean .*{ledger.invited[1].id}"):
            subject_named("joe", ledger, [friend])


def test_the_key_has_to_be_this_runs_and_the_run_closed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"run small is open.*swarm init --invite"):
        load_key(small(directory=tmp_path), None)
    recipe = small("access=invite", f"run_key={ADA.text}", directory=tmp_path)
    RunKey.create(key_file(recipe))
    with pytest.raises(MembershipError, match="key of another run"):
        load_key(recipe, None)
