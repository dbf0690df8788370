"""Links that are printed again, and what the owner of a closed run does, as far as it needs no network."""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from swarmcli.cli.closed import _Run, _run_named, invite, members
from swarmcli.cli.consent import invitation_in_words
from swarmcli.cli.init import init
from swarmcli.cli.link import contacts_of, link
from swarmcli.errors import UsageError
from swarmcli.journal import Journal, RunRecord
from swarmcli.machine.registry import LocalPeer, LocalPeers, birth_of
from swarmcli.network.identity import Identity
from swarmcli.network.membership import InvitationKind
from swarmcli.peer.linked import LinkedRun
from swarmcli.recipe import Link, digest_of, load_recipe, parse_link, parse_recipe
from swarmcli.recipe.offered import needs_in_words
from tests.cli.typed import typed
from tests.recipe.recipes import SMALL

again, owners = typed(link), typed(init, invite, members)
PEER = Identity.from_seed(1).peer_id
DIGEST = digest_of(parse_recipe(SMALL))
CLOSED = parse_recipe(SMALL + f"access: invite\nrun_key: {PEER.text}\n")


def home(path: Path, place: str, *, age: int = 0, runs: bool = False, run_id: str = "small") -> Link:
    path.mkdir(parents=True)
    found = Link(PEER, (place,), run_id, DIGEST)
    (path / "link").write_text(f"{found}\n")
    os.utime(path / "link", (1e9 - age, 1e9 - age))
    if runs:
        (path / "peer.json").touch()
    return found


def said(*arguments: object) -> tuple[str, str]:
    result = again(*arguments)
    return result.stdout.strip(), result.stderr.strip()


def test_the_command_is_printed_again_for_a_directory_a_recipe_and_a_link(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(SMALL)
    own = home(tmp_path / "runs" / "small" / "monitor-1", "203.0.113.7:1")
    for what in (tmp_path / "recipe.yaml", tmp_path / "runs", tmp_path / "runs" / "small" / "monitor-1"):
        assert said(what)[0] == f'swarm join "{own}"'
    assert "not running now" in said(tmp_path)[1]
    closed = home(tmp_path / "closed", "203.0.113.7:1")
    (tmp_path / "closed" / "link").write_text(f"{closed}\n{needs_in_words(CLOSED)}\n")
    command, beside = said(tmp_path / "closed")
    assert command == f'swarm join "{closed}"' and "swarm invite" in beside, "the link is not enough"
    assert "within this network" not in beside
    assert said(tmp_path / "closed", "--copyable") == (str(closed), "")
    joined = home(LinkedRun(own).path / "small" / "trainer-1", "203.0.113.8:1")
    assert said(own)[0] == said()[0] == f'swarm join "{joined}"'


def test_a_peer_that_runs_is_found_by_its_link_and_its_recipe_wherever_its_home_is(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(SMALL)
    own, other = home(tmp_path / "here", "203.0.113.7:1", runs=True), tmp_path / "other"
    home(other, "203.0.113.8:1", runs=True, run_id="other")
    with ExitStack() as living:
        for pid, path in ((os.getpid(), tmp_path / "here"), (os.getppid(), other)):
            runs = replace(LocalPeer.here("auxiliary", "small", path), pid=pid, born=birth_of(pid))
            living.enter_context(LocalPeers().entered(runs))
        for what in (own, tmp_path / "recipe.yaml"):
            assert said(what)[0] == f'swarm join "{own}"'
    with pytest.raises(UsageError, match="no peer of the run small on this machine"):
        said(own)


def test_a_run_is_found_by_its_name_where_its_journal_is_found(tmp_path: Path) -> None:
    own = home(tmp_path / "runs" / "small" / "monitor-1", "203.0.113.7:1")
    home(tmp_path / "runs" / "other" / "monitor-1", "203.0.113.8:1", run_id="other")
    assert said("small")[0] == f'swarm join "{own}"'
    named = _run_named("small", [], [])
    assert (named.run_id, named.link, named.contacts) == ("small", own, list(own.addresses))
    with pytest.raises(UsageError, match="no peer of the run nowhere on this machine has given out a link"):
        said("nowhere")


def test_a_peer_that_gave_out_no_link_knows_whom_to_ask_about_its_run(tmp_path: Path) -> None:
    client = tmp_path / "runs" / "small" / "trainer-1"
    Journal(
        client / "journal.sqlite", run=RunRecord("small", "trainer", PEER.text, "Ada", "0.1.0"), clock=time.time
    ).close()
    with pytest.raises(UsageError, match="no peer of the run small"):
        _run_named("small", [], [])
    monitor = f"tcp://203.0.113.8:31330/{PEER}"
    (client / "contacts.json").write_text(json.dumps([monitor]))
    assert _run_named("small", [], []) == _Run("small", [monitor])


def test_who_runs_comes_before_who_is_newer_and_each_run_has_one(tmp_path: Path) -> None:
    running = home(tmp_path / "a", "203.0.113.7:1", age=9, runs=True)
    home(tmp_path / "b", "203.0.113.8:1")
    other = home(tmp_path / "c", "203.0.113.9:1", run_id="other")
    assert set(said(tmp_path)[0].splitlines()) == {f'swarm join "{running}"', f'swarm join "{other}"'}
    with pytest.raises(UsageError, match="2 runs"):
        said(tmp_path, "--copyable")
    with pytest.raises(UsageError, match="on this machine"):
        said()
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "link").write_text("torn")
    with pytest.raises(UsageError, match="swarm monitor RECIPE"):
        said(tmp_path / "e")
    home(tmp_path / "d" / "here", "10.1.2.3:7", runs=True)
    assert "within this network only" in said(tmp_path / "d")[1] and "not running" not in said(tmp_path / "d")[1]


def test_a_run_is_asked_by_the_peers_that_its_own_one_knew_since_that_may_run_no_more(tmp_path: Path) -> None:
    own = home(tmp_path / "trainer-1", "203.0.113.7:1")
    monitor = f"tcp://203.0.113.8:31330/{Identity.from_seed(2).peer_id}"
    (tmp_path / "trainer-1" / "contacts.json").write_text(json.dumps([monitor, *own.addresses]))
    assert contacts_of(tmp_path / "trainer-1", own) == [*own.addresses, monitor]
    (tmp_path / "trainer-1" / "contacts.json").write_text("garbled")
    assert contacts_of(tmp_path / "trainer-1", own) == list(own.addresses)


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
