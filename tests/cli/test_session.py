from __future__ import annotations

import shlex
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from swarmcli.cli.leaving import Leaving
from swarmcli.cli.page import PageOptions
from swarmcli.cli.session import GONE, join_line, say_who_runs_already, session_of
from swarmcli.dht import first_contact
from swarmcli.errors import AddressError, BootstrapError, ControlError, ListenError, MembershipError
from swarmcli.events import MembershipEnded
from swarmcli.machine import client
from swarmcli.machine.registry import LocalPeer, LocalPeers
from swarmcli.peer.activity import STAYS_ASKED, STAYS_HURRIED, Activity, PendingWork
from swarmcli.peer.home import LINK, Home
from swarmcli.peer.joining import ReadyPeer
from swarmcli.peer.summary import Summary
from swarmcli.recipe import load_recipe, parse_recipe
from tests.peer.test_links import lost, peer
from tests.recipe.recipes import small

RECIPE = Path(__file__).parents[2] / "recipes" / "stdlib-lm.yaml"


def leaving(**peer: Any) -> Leaving:
    return Leaving(cast(Any, SimpleNamespace(**peer)), cast(Any, SimpleNamespace(state=None)))


def test_the_join_line_can_be_typed_as_it_is_with_what_others_must_override_likewise() -> None:
    overrides = ["max_epochs=19", "local.threads=1", "output_dir=/tmp", "optimizer.betas=[0.9, 0.95]"]
    dht = SimpleNamespace(get_visible_addresses=lambda: ["tcp://127.0.0.1:31330/abc", "tcp://10.0.0.1:31330/abc"])
    recipe = parse_recipe(RECIPE.read_text(), overrides, name="a recipe.yaml")
    assert shlex.split(join_line(recipe, cast(Any, SimpleNamespace(dht=dht)))) == [
        "swarm", "join", "a recipe.yaml", "--set", "max_epochs=19", "--set", "optimizer.betas=[0.9, 0.95]",
        "--peer", "tcp://127.0.0.1:31330/abc",
    ]  # fmt: skip


def test_a_second_peer_of_the_same_command_is_told_that_it_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = LocalPeer.here("trainer", "run", tmp_path / "trainer-1")
    with LocalPeers().entered(replace(here, name="Ada")):
        for role, home in (("trainer", "trainer-1"), ("monitor", "monitor-1"), ("trainer", "trainer-2")):
            say_who_runs_already(cast(Any, role), Home(tmp_path / home, None))
    [said] = capsys.readouterr().err.splitlines()
    assert said == "this computer already takes part in this run, as Ada; this is one more peer, trainer-2"


def test_a_taken_port_names_its_option_and_an_address_that_cannot_be_read_is_named(
    tmp_path: Path,
) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        for role, override, contacts, web_port, error, words in (
            ("trainer", f"local.port={port}", [], None, ListenError, "--port PORT"),
            ("monitor", "seed=1", [], port, ListenError, "--web PORT"),
            ("trainer", "seed=1", ["127.0.0.1:31330"], None, AddressError, r"127\.0\.0\.1:31330"),
        ):
            recipe = load_recipe(RECIPE, [f"output_dir={tmp_path}", override])
            with (
                pytest.raises(error, match=words),  # type: ignore[call-overload]
                session_of(role, recipe, contacts, page=PageOptions(web_port)),  # type: ignore[arg-type]
            ):
                raise AssertionError("the session must not begin: nobody may meet a peer that leaves at once")


def test_a_peer_that_could_not_evaluate_says_so_before_it_meets_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def met(ready: ReadyPeer) -> Iterator[None]:
        raise BootstrapError("no first contact answered")
        yield

    monkeypatch.setattr("swarmcli.cli.session.joined", met)
    lacks = f"this peer cannot evaluate the model: nothing is at {tmp_path}/gone; put the data there, or name"
    for more, told in ((["evaluation.every_epochs=9", "evaluation.held_out=0.1"], True), ([], False)):
        recipe = small(f"output_dir={tmp_path}", "datasets=[{path: ./gone}]", *more, directory=tmp_path)
        with pytest.raises(BootstrapError), session_of("monitor", recipe, []):
            raise AssertionError("the session must not begin")
        said = capsys.readouterr().err
        assert (lacks in said and "--set local.data_dir=DIRECTORY" in said) == told, said


@pytest.mark.parametrize("met", [False, True])
def test_a_copy_of_a_running_peer_is_refused_and_tells_nobody_how_to_join(
    met: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def gives_way(ready: ReadyPeer) -> Iterator[None]:
        ready.peer.events.emit(MembershipEnded("another process has this peer's key, and was there first"))
        if not met:
            raise BootstrapError("no first contact answered")
        yield

    monkeypatch.setattr("swarmcli.cli.session.joined", gives_way)
    with (
        pytest.raises(MembershipError, match="has this peer's key"),
        session_of("trainer", load_recipe(RECIPE, [f"output_dir={tmp_path}"]), []),
    ):
        raise AssertionError("the session must not begin")
    assert "join" not in capsys.readouterr().out


def test_a_peer_that_looks_for_its_contacts_can_be_asked_and_what_is_asked_holds_from_its_start_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_contact, "TELL", 0.2)
    monkeypatch.setattr(first_contact, "LOOK", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        contact = f"127.0.0.1:{free.getsockname()[1]}"
    recipe = small("local.host=127.0.0.1", f"output_dir={tmp_path}", directory=tmp_path)
    exits, home = ExitStack(), tmp_path / "b"

    def ask() -> None:
        registry, waits = LocalPeers(), ""
        while not (found := [each for each in registry.peers() if each.home == str(home) and each.port]):
            time.sleep(0.01)
        while contact not in waits:
            waits = client.get(found[0], "state", registry=registry)["run"]["waits"]
        assert client.post(found[0], "pause", {}, registry=registry)["state"] == "pausing"
        with pytest.raises(ControlError, match="much"):
            client.patch(found[0], "limits", {"changes": {"upload": "much"}, "keep": False}, registry=registry)
        assert client.post(found[0], "resume", {}, registry=registry)["state"] == "running"
        client.post(found[0], "pause", {"seconds": 3600.0}, registry=registry)
        client.patch(found[0], "limits", {"changes": {"upload": "100kB/s"}, "keep": False}, registry=registry)
        exits.enter_context(peer(tmp_path / "a", "monitor", f"local.port={contact.rpartition(':')[2]}"))

    with exits, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        with session_of("trainer", recipe, [f"tcp://{contact}"], home) as session:
            asked.result()
            status = session.peer.activity.status()
            assert status.state == "pausing" and "until" in status.reasons[0].text
            assert session.peer.limits.limits.upload == 100e3


def test_a_peer_whose_contact_has_gone_says_that_its_link_no_longer_holds(tmp_path: Path) -> None:
    recipe = small("local.host=127.0.0.1", "local.client_mode=true", f"output_dir={tmp_path}", directory=tmp_path)
    with ExitStack() as exits:
        contact = exits.enter_context(peer(tmp_path, "monitor"))
        with session_of("auxiliary", recipe, contact.dht.get_visible_addresses()[:1], tmp_path / "client") as session:
            file, heard = tmp_path / "client" / LINK, list[str]()
            session.peer.events.subscribe(lambda event: heard.append(getattr(event, "text", "")))
            assert file.read_text().strip() == str(contact.link())
            exits.close()
            session.peer.dht.run_coroutine(lost(session.peer, contact))
            assert f"{GONE} {session.peer.no_link}" in heard and not file.exists()


def signalled(activity: Activity) -> Callable[[signal.Signals, bool], None]:
    return leaving(activity=activity, outcome="", summary=Summary("run", "trainer", epoch=1)).signalled


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_as_the_verb_does_and_a_second_hurries(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    activity = Activity()
    activity.pending = lambda: PendingWork(1200, 240.0)
    hear = signalled(activity)
    hear(number, False)
    sooner = "Ctrl-C again or `swarm stop --now` leaves without handing in\n"
    assert number != signal.SIGINT or capsys.readouterr().err == sooner
    stays = STAYS_ASKED if number == signal.SIGINT else STAYS_HURRIED
    assert activity.status().state == "stopping" and activity.status().stays == stays
    hear(signal.SIGTERM, True)
    assert activity.status().stays == 0
    behind = Activity()
    behind.stop()  # by the verb
    signalled(behind)(number, False)
    assert behind.status().stays == (0.0 if number == signal.SIGINT else STAYS_HURRIED)


def test_who_has_not_come_into_the_run_is_gone_soon_whatever_holds_up_its_goodbye(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[Callable[[], object]] = []
    monkeypatch.setattr("swarmcli.cli.leaving.end_soon", lambda say, code: said.append(say) or object())
    home = SimpleNamespace(path="h")
    for epoch, kept in ((1, 0), (0, 64), (0, 0)):
        activity = Activity()
        activity.pending = lambda kept=kept: PendingWork(kept, 1.0)  # type: ignore[misc]
        summary = Summary("run", "trainer", "Ada", "a" * 52, epoch=epoch)
        leaving(activity=activity, outcome="", summary=summary, home=home).signalled(signal.SIGINT, False)
    [say] = said  # of the last one alone, and once
    say()
    say()
    assert capsys.readouterr().err.count("left at epoch 0 after 0 samples this time; my files are in h") == 1


def test_who_leaves_is_told_what_is_lost() -> None:
    summary = Summary("run", "trainer", "Ada", "a" * 52, epoch=3, samples=1536)
    left = leaving(summary=summary, home=SimpleNamespace(path="h"))
    assert left.farewell() == "left at epoch 3 after 1,536 samples this time; my files are in h"
    summary.lost = 368
    assert left.farewell() == (
        "left at epoch 3 after 1,536 samples this time; 368 more are lost: their epoch had not ended; my files are in h"
    )
    summary.why_lost = "nobody else computes at present"
    assert "368 more are lost: nobody else computes at present; my files" in left.farewell()
