"""The owner's commands, as far as they need no network."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from swarmcli.cli.closed import invite, members
from swarmcli.cli.consent import invitation_in_words
from swarmcli.cli.init import init
from swarmcli.errors import UsageError
from swarmcli.network.identity import Identity
from swarmcli.network.membership import InvitationKind
from swarmcli.recipe import Link, digest_of, load_recipe, parse_link

app = typer.Typer()
for verb in (init, invite, members):
    app.command()(verb)
PEER = Identity.from_seed(1).peer_id


def said(*words: str) -> str:
    return CliRunner().invoke(app, list(words), catch_exceptions=False).stdout.strip()


def test_a_link_with_an_invitation_names_the_peer_that_binds_it() -> None:
    said("init", "--invite", "lab.yaml")
    recipe = load_recipe("lab.yaml")
    with pytest.raises(UsageError, match=r"start `swarm monitor lab\.yaml` first"):
        said("invite", "lab.yaml")
    with pytest.raises(
        UsageError, match=r"start `swarm monitor .*lab\.yaml` first, or name a peer elsewhere with --peer"
    ):
        said("members", "lab.yaml")
    plain = Link(PEER, ("203.0.113.7:1",), "lab", digest_of(recipe))
    home = recipe.output_dir / "lab" / "monitor-1"
    home.mkdir(parents=True)
    (home / "link").write_text(f"{plain}\n")
    made = parse_link(said("invite", "lab.yaml", "--copyable"))
    assert made.ticket is not None and made.places == plain.places
    assert (made.ticket.invitation.kind, made.ticket.invitation.host) == (InvitationKind.BEARER, PEER)
    assert made.ticket.invitation.is_genuine(made.ticket.run(digest_of(recipe)))
    assert "closed run" in invitation_in_words(made.ticket)
    one = parse_link(said("invite", "lab.yaml", "--copyable", "--for", PEER.text, "--link", str(plain)))
    assert one.ticket is not None and one.ticket.invitation.holder == PEER and not one.ticket.secret
    with pytest.raises(UsageError, match="link is one of another run"):
        said("invite", "lab.yaml", "--link", str(Link(PEER, ("203.0.113.7:1",), "lab", "b" * 32)))
    with pytest.raises(UsageError, match="--days"):
        said("invite", "lab.yaml", "--days", "0")
