"""Which run, and which of this user's peers in it, a person means: the same for all verbs."""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from msgspec.structs import replace

from swarmcli.cli.closed import _Run, _run_named
from swarmcli.cli.contributions import only_home
from swarmcli.cli.which import contacts_of, home_of, homes_of, journal_of
from swarmcli.errors import UsageError
from swarmcli.machine.registry import LocalPeer, LocalPeers, birth_of
from swarmcli.network.identity import Identity
from swarmcli.peer.home import LINK
from swarmcli.peer.linked import LinkedRun
from tests.cli.homes import home, with_journal
from tests.recipe.recipes import SMALL


def living(path: Path, pid: int = os.getpid()) -> AbstractContextManager[object]:
    peer = replace(LocalPeer.here("trainer", "small", path), pid=pid, born=birth_of(pid))
    return LocalPeers().entered(peer)


def test_a_directory_a_recipe_a_link_a_name_and_nothing_lead_to_the_same_home(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(SMALL)
    own = tmp_path / "runs" / "small" / "monitor-1"
    link = home(own)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "link").write_text("the link of another program")
    for what in (own, tmp_path, tmp_path / "runs", tmp_path / "recipe.yaml", link, "small", None):
        assert homes_of(None if what is None else str(what), LINK) == [own]
    home(tmp_path / "runs" / "other" / "monitor-1", run_id="other")
    for what in (tmp_path / "recipe.yaml", link, "small"):
        assert homes_of(str(what), LINK) == [own]
    joined = LinkedRun(link).path / "small" / "trainer-1"
    home(joined)
    assert set(homes_of(str(link), LINK)) == {own, joined}


def test_a_name_of_a_run_means_that_run_in_a_directory_of_several_that_is_called_so(tmp_path: Path) -> None:
    own = tmp_path / "small" / "runs" / "small" / "monitor-1"
    home(own)
    home(tmp_path / "small" / "runs" / "small-2" / "monitor-1", run_id="small-2")
    assert home_of("small", LINK) == own


def test_a_peer_that_runs_is_found_wherever_its_home_is_and_those_beside_it_too(tmp_path: Path) -> None:
    far = tmp_path / "a" / "b" / "c" / "d" / "e"
    link = home(far / "monitor-1")
    home(far / "trainer-1")
    home(far / "texts")
    with pytest.raises(UsageError, match="no peer of the run small on this computer has given out a link"):
        homes_of(str(link), LINK)
    with living(far / "monitor-1"):
        assert homes_of(str(link), LINK)[0] == homes_of("small", LINK)[0] == far / "monitor-1"
        assert far / "trainer-1" in homes_of(None, LINK)


def test_of_several_peers_those_that_run_come_first_then_monitors_then_the_latest(tmp_path: Path) -> None:
    for name, age in (("old", 9), ("new", 0), ("monitor-1", 5)):
        home(tmp_path / name, age=age)
    assert [each.name for each in homes_of(str(tmp_path), LINK)] == ["monitor-1", "new", "old"]
    with living(tmp_path / "old"):
        assert home_of(None, LINK) == home_of(str(tmp_path), LINK) == tmp_path / "old"
    home(tmp_path / "other", run_id="other")
    with pytest.raises(UsageError, match=r"(?s)peers of 2 runs are known here; name a run or .*monitor-1  small"):
        home_of(None, LINK)
    with living(tmp_path / "other"):
        assert home_of(None, LINK) == tmp_path / "other"


def test_where_a_person_names_nothing_runs_here_come_before_those_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = with_journal(tmp_path / "data" / "run" / "trainer-1", "elsewhere")
    here = with_journal(tmp_path / "here" / "trainer-1")
    monkeypatch.chdir(tmp_path / "here")
    assert journal_of(None) == here and journal_of("elsewhere") == elsewhere
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert journal_of(None) == elsewhere


def test_a_journal_is_a_file_too_and_where_there_is_none_it_is_said_what_to_give(tmp_path: Path) -> None:
    path = with_journal(tmp_path / "trainer-1")
    copy = path.rename(tmp_path / "trainer-1" / "copy.sqlite")
    assert journal_of(str(copy)) == copy
    for named, words in (
        (str(tmp_path), "no peer in or below .* has left a journal; name a recipe or the peer's directory"),
        ("nothing.yaml", "nothing.yaml does not exist; name a recipe, a peer's directory"),
        ("nothing", "no peer of the run nothing on this computer has left a journal"),
    ):
        with pytest.raises(UsageError, match=words):
            journal_of(named)


def test_a_certificate_is_that_of_the_peer_that_gives_something(tmp_path: Path) -> None:
    for name in ("monitor-1", "trainer-1"):
        home(tmp_path / "runs" / name)
    assert only_home() == tmp_path / "runs" / "trainer-1"
    home(tmp_path / "runs" / "trainer-2")
    with pytest.raises(UsageError, match="2 peers are known on this computer; say which with --home"):
        only_home()
    with living(tmp_path / "runs" / "trainer-2"):
        assert only_home() == tmp_path / "runs" / "trainer-2"
    for name in ("trainer-1", "trainer-2"):
        (tmp_path / "runs" / name / LINK).unlink()
    assert only_home() == tmp_path / "runs" / "monitor-1"


def test_a_run_is_asked_by_its_own_peer_while_that_runs_and_by_those_that_it_knew(tmp_path: Path) -> None:
    """It may have given out no link."""
    own = tmp_path / "runs" / "small" / "trainer-1"
    link = home(own)
    monitor = f"tcp://203.0.113.8:31330/{Identity.from_seed(2).peer_id}"
    (own / "contacts.json").write_text(json.dumps([monitor, *link.addresses]))
    with living(own):
        assert contacts_of(own) == [*link.addresses, monitor]
        assert _run_named("small", [], []) == _Run("small", [*link.addresses, monitor], link=link)
    (own / "contacts.json").write_text("garbled")
    with living(own):
        assert contacts_of(own) == list(link.addresses)
    with_journal(own)
    (own / LINK).unlink()
    with pytest.raises(UsageError, match="does not run, and knew no other one; start it again, or name a peer"):
        _run_named("small", [], [])
    (own / "contacts.json").write_text(json.dumps([monitor]))
    assert _run_named("small", [], []) == _Run("small", [monitor])
