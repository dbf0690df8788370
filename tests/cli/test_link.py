"""Links that are printed again, and what the owner of a closed run does, as far as it needs no network."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmcli.cli.closed import invite, members
from swarmcli.cli.consent import invitation_in_words
from swarmcli.cli.init import init
from swarmcli.cli.link import link
from swarmcli.errors import UsageError
from swarmcli.machine.registry import LocalPeer, LocalPeers
from swarmcli.network.identity import Identity
from swarmcli.network.membership import InvitationKind
from swarmcli.recipe import Link, digest_of, load_recipe, parse_link, parse_recipe
from swarmcli.recipe.offered import data_in_words, needs_in_words
from tests.cli.homes import home
from tests.cli.typed import typed
from tests.recipe.recipes import SMALL

again, owners = typed(link), typed(init, invite, members)
PEER = Identity.from_seed(1).peer_id
CLOSED = parse_recipe(SMALL + f"access: invite\nrun_key: {PEER.text}\n")


def said(*arguments: object) -> tuple[str, str]:
    result = again(*arguments)
    return result.stdout.strip(), result.stderr.strip()


def test_the_command_is_printed_again_for_each_run_and_says_what_else_it_takes_to_join(tmp_path: Path) -> None:
    own = home(tmp_path / "runs" / "small" / "monitor-1", "203.0.113.7:1")
    assert said()[0] == said(tmp_path / "runs")[0] == f'swarm join "{own}"'
    assert "not running now" in said(tmp_path)[1] and "within this network" not in said(tmp_path)[1]
    closed = home(tmp_path / "closed", "203.0.113.7:1", run_id="other")
    (tmp_path / "closed" / "link").write_text(f"{closed}\n{needs_in_words(CLOSED)}\n")
    command, beside = said(tmp_path / "closed")
    assert command == f'swarm join "{closed}"' and "swarm invite" in beside, "the link is not enough"
    assert said(tmp_path / "closed", "--copyable") == (str(closed), "")
    files = parse_recipe(SMALL.replace("source: stdlib", "path: ./texts"))
    (tmp_path / "closed" / "link").write_text(f"{closed}\n{data_in_words(files)}\n")
    command, beside = said(tmp_path / "closed")
    assert command == f'swarm join "{closed}" --set local.data_dir=DIRECTORY' and "a copy of ./texts, and" in beside
    with pytest.raises(UsageError, match="2 runs"):
        said(tmp_path, "--copyable")
    (tmp_path / "closed" / "link").write_text("torn")
    (tmp_path / "closed" / "identity.key").touch()
    with pytest.raises(UsageError, match="cannot be read"):
        said(tmp_path / "closed")
    home(tmp_path / "lan", "10.1.2.3:7")
    with LocalPeers().entered(LocalPeer.here("trainer", "small", tmp_path / "lan")):
        assert "within this network only" in said(tmp_path / "lan")[1]
        assert "not running" not in said(tmp_path / "lan")[1]


def owner(*words: str) -> str:
    return owners(*words).stdout.strip()


def test_a_link_with_an_invitation_names_the_peer_that_binds_it() -> None:
    owner("init", "--invite", "lab.yaml")
    recipe = load_recipe("lab.yaml")
    with pytest.raises(UsageError, match=r"start `swarm monitor lab\.yaml` first"):
        owner("invite", "lab.yaml")
    with pytest.raises(
        UsageError, match=r"start `swarm monitor .*lab\.yaml` first, or name a peer elsewhere with --peer"
    ):
        owner("members", "lab.yaml")
    plain = Link(PEER, ("203.0.113.7:1",), "lab", digest_of(recipe))
    home = recipe.output_dir / "lab" / "monitor-1"
    home.mkdir(parents=True)
    (home / "link").write_text(f"{plain}\n")
    made = parse_link(owner("invite", "lab.yaml", "--copyable"))
    assert made.ticket is not None and made.places == plain.places
    assert (made.ticket.invitation.kind, made.ticket.invitation.host) == (InvitationKind.BEARER, PEER)
    assert made.ticket.invitation.is_genuine(made.ticket.run(digest_of(recipe)))
    assert "closed run" in invitation_in_words(made.ticket)
    one = parse_link(owner("invite", "lab.yaml", "--copyable", "--for", PEER.text, "--link", str(plain)))
    assert one.ticket is not None and one.ticket.invitation.holder == PEER and not one.ticket.secret
    with pytest.raises(UsageError, match="link is one of another run"):
        owner("invite", "lab.yaml", "--link", str(Link(PEER, ("203.0.113.7:1",), "lab", "b" * 32)))
    with pytest.raises(UsageError, match="--days"):
        owner("invite", "lab.yaml", "--days", "0")
