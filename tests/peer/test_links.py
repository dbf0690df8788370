"""Which link a peer has, over real TCP: its own, or its contact's."""

from __future__ import annotations

import json
import queue
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from swarmcli.dht import first_contact
from swarmcli.errors import BootstrapError, ListenError
from swarmcli.events import Event, Events, Noticed
from swarmcli.optim import PeerDescription, PeerReport
from swarmcli.optim.config import Role
from swarmcli.optim.peers.report import PeerMetrics, describe
from swarmcli.optim.state.lineage import LineagePosition
from swarmcli.peer.home import CONTACTS, LINK, PORT, Home
from swarmcli.peer.joining import join_run, known_addresses
from swarmcli.peer.offering import fetch_recipe
from swarmcli.peer.peer import RunPeer
from swarmcli.recipe import fingerprint_of, parse_link
from tests.recipe.recipes import small


def peer(
    home: Path, role: Role, *overrides: str, contacts: tuple[str, ...] = (), listener: Callable[[Event], object] = bool
) -> AbstractContextManager[RunPeer]:
    recipe = small("local.host=127.0.0.1", f"output_dir={home}", *overrides, directory=home)
    return join_run(recipe, role, Home.at(home / role), contacts=contacts, listener=listener)


def test_a_stranger_gets_config_and_tokenizer_of_a_saved_model_from_any_peer(tmp_path: Path) -> None:
    home = tmp_path / "a" / "tiny"
    home.mkdir(parents=True)
    (home / "config.json").write_text('{"model_type": "gpt2"}')
    (home / "vocab.json").write_text("{}")
    came: dict[Path, bytes] = {}
    with peer(tmp_path / "a", "monitor", "base_model=tiny") as owner:
        link = owner.link()
        assert link is not None
        recipe, _ = fetch_recipe(link, tmp_path / "stranger", came.update)
    assert recipe.base_model == "models/tiny"
    assert came[tmp_path / "stranger" / "models" / "tiny" / "vocab.json"] == b"{}" and len(came) == 2


def test_a_stranger_gets_the_recipe_from_any_peer_and_a_client_points_to_its_contact(tmp_path: Path) -> None:
    with peer(tmp_path / "a", "monitor", "seed=4") as owner:
        link = owner.link()
        assert link is not None and link.peer_id == owner.peer_id and link.places[0].startswith("127.0.0.1:")
        recipe, answer = fetch_recipe(link, tmp_path / "stranger")
        assert recipe.seed == 4 and fingerprint_of(recipe) == owner.fingerprint
        assert (answer.epoch, answer.epoch_seconds) == (0, 0.0)
        with peer(tmp_path / "b", "auxiliary", "seed=4", contacts=link.addresses) as listening:
            through = listening.link()
            assert through is not None and through.peer_id == listening.peer_id
            assert fetch_recipe(through, tmp_path / "stranger")[0].model_dump() == recipe.model_dump()
        wish = ("seed=4", "local.client_mode=true")
        with peer(tmp_path / "c", "auxiliary", *wish, contacts=link.addresses) as client:
            assert client.link() == link


def test_a_peer_that_begins_without_a_contact_reaches_those_that_it_knew_last(tmp_path: Path) -> None:
    """It has moved to another computer: they would dial it where it was."""
    with peer(tmp_path / "there", "trainer") as known:
        moved = peer(tmp_path / "here", "monitor")
        (tmp_path / "here" / "monitor" / CONTACTS).write_text(json.dumps(known.dht.get_visible_addresses()))
        with moved as there:
            assert f"/{known.peer_id}" in there.dht.run_coroutine(known_addresses)[0]


def test_a_peer_listens_where_it_did_in_its_last_life_unless_that_port_is_taken(tmp_path: Path) -> None:
    def life(*overrides: str) -> int:
        recipe = small("local.host=127.0.0.1", f"output_dir={tmp_path}", *overrides, directory=tmp_path)
        with Home.at(tmp_path / "auxiliary") as home, join_run(recipe, "auxiliary", home) as living:
            return living.port

    first = life()
    assert life() == first
    with socket.create_server(("127.0.0.1", first)):
        second = life()
    assert second not in (0, first) and life("local.client_mode=true") == 0
    with socket.create_server(("127.0.0.1", second)), pytest.raises(ListenError):
        life(f"local.port={second}")
    assert life() == second
    (tmp_path / "auxiliary" / PORT).write_text("torn")
    assert life("local.port=0") and life()


def report(role: Role, of: RunPeer, samples: int = 0) -> PeerReport:
    """What a peer says of itself, as far as links go by it."""
    metrics = PeerMetrics(of.peer_id, Events())
    metrics.samples = samples
    position = LineagePosition(0, 0, bytes(32))
    return describe(of.dht.node, PeerDescription(role, "", "cpu"), "", metrics, "training", position)


def test_a_link_names_who_can_be_dialed_and_stays_and_no_hearsay(tmp_path: Path) -> None:
    """Seen from a trainer: a monitor, itself, and of the other trainers those that have computed more. Whoever claims
    much cannot drive this peer or its contact out of the link."""
    with ExitStack() as exits:
        monitor = exits.enter_context(peer(tmp_path / "m", "monitor"))
        contact = monitor.dht.get_visible_addresses()[0]
        me = exits.enter_context(peer(tmp_path / "me", "trainer", contacts=(contact,)))
        others = [exits.enter_context(peer(tmp_path / name, "trainer", contacts=(contact,))) for name in "abcde"]
        for other in others[:4]:
            where = other.dht.get_visible_addresses()[0]
            me.dht.run_coroutine(me.dht.endpoint.probe(where, other.peer_id, timeout=10.0))
        assert me.link().each[0].peer_id == me.peer_id  # type: ignore[union-attr]  # nobody has said yet what it is
        said = [report("trainer", other, samples) for other, samples in zip(others, (5, 50, 7, 1, 99), strict=True)]
        me.members.others = lambda: {  # type: ignore[method-assign]
            monitor.peer_id: report("monitor", monitor),
            **{other.peer_id: each for other, each in zip(others, said, strict=True)},
        }
        link = me.link()
        assert link is not None and parse_link(str(link)) == link
        assert [each.peer_id for each in link.each] == [each.peer_id for each in (monitor, others[1], others[2], me)]
        assert all(fetch_recipe(each, tmp_path / "stranger") for each in link.each)
        said[:4] = [report("monitor", other) for other in others[:4]]
        found = me.link()
        assert found is not None and {me.peer_id, monitor.peer_id} < {each.peer_id for each in found.each}


async def lost(client: RunPeer, other: RunPeer) -> None:
    await client.dht.endpoint.lost(other.peer_id)


def test_a_peer_whose_contact_has_left_points_to_another_and_finds_back_by_those_it_knew(tmp_path: Path) -> None:
    wish = "local.client_mode=true"
    with ExitStack() as exits:
        leave = exits.enter_context(ExitStack())
        owner = leave.enter_context(peer(tmp_path / "a", "monitor"))
        contact = owner.dht.get_visible_addresses()[0]
        other = exits.enter_context(peer(tmp_path / "b", "auxiliary", contacts=(contact,)))
        with peer(tmp_path / "c", "trainer", wish, contacts=(contact,)) as client:
            where = other.dht.get_visible_addresses()[0]
            client.dht.run_coroutine(client.dht.endpoint.connect(where, timeout=10.0))
            client.members.others = lambda: {other.peer_id: report("auxiliary", other)}  # type: ignore[method-assign]
            leave.close()
            client.dht.run_coroutine(lost(client, owner))
            link = client.link()
            assert link is not None and link.peer_id == other.peer_id and link.addresses[0] == where
        client.home.release()
        with peer(tmp_path / "c", "trainer", wish, contacts=(contact,)) as client:
            assert client.dht.run_coroutine(connected(client, other))


def test_a_peer_whose_contact_has_gone_joins_by_a_peer_that_runs_in_the_home_beside_it(tmp_path: Path) -> None:
    with ExitStack() as leaving:
        contact = leaving.enter_context(peer(tmp_path / "a", "monitor"))
        gone = (contact.dht.get_visible_addresses()[0],)
        recipe = small("local.host=127.0.0.1", f"output_dir={tmp_path}", directory=tmp_path)
        with (
            Home.claim(tmp_path / "small", "auxiliary") as first,
            Home.claim(tmp_path / "small", "auxiliary") as second,
            join_run(recipe, "auxiliary", first, contacts=gone) as beside,
        ):
            beside.links.tell()
            leaving.close()
            with join_run(recipe, "auxiliary", second, contacts=gone) as late:
                assert late.dht.run_coroutine(connected(late, beside))


def rejoining(home: Path, contact: str, told: Callable[[Event], None]) -> AbstractContextManager[RunPeer]:
    recipe = small("local.host=127.0.0.1", f"output_dir={home}", "local.client_mode=true", directory=home)
    return join_run(recipe, "trainer", Home.at(home / "trainer"), contacts=(contact,), listener=told, patience=0.5)


def test_a_newcomer_gives_up_and_who_has_been_in_the_run_waits_for_it_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that was killed: it has written down whom it knew while it ran."""
    monkeypatch.setattr(first_contact, "TELL", 0.2)
    monkeypatch.setattr(first_contact, "LOOK", 0.1)
    with peer(tmp_path / "a", "monitor") as first:
        contact = first.dht.get_visible_addresses()[0]
        place = contact.split("/")[2]
        with rejoining(tmp_path / "c", contact, lambda event: None) as trainer:
            known = json.loads((trainer.home.path / CONTACTS).read_text())
            assert contact in known, "before its end"
        trainer.home.release()
    first.home.release()
    with (
        pytest.raises(BootstrapError, match=r"within 0\.5 s"),
        rejoining(tmp_path / "new", contact, lambda event: None),
    ):
        pass

    said = queue.Queue[str]()
    back = rejoining(
        tmp_path / "c", contact, lambda event: said.put(event.text) if isinstance(event, Noticed) else None
    )
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(back.__enter__)
        waits = said.get(timeout=60.0)
        assert place in waits and "Ctrl-C" in waits
        with peer(tmp_path / "a", "monitor") as again:
            assert joined.result(60.0).dht.run_coroutine(connected(joined.result(), again))
            back.__exit__(None, None, None)


async def connected(client: RunPeer, other: RunPeer) -> bool:
    return client.dht.endpoint.is_connected(other.peer_id)


def test_the_link_is_left_in_the_home_and_told_anew_when_it_changes_and_who_has_none_says_why(tmp_path: Path) -> None:
    with peer(tmp_path, "monitor") as owner:
        assert owner.links.has_another_link()
        owner.links.tell("http://127.0.0.1:1/")
        assert not owner.links.has_another_link()
        told = json.loads((owner.home.path / "peer.json").read_text())
        assert told["link"] == str(owner.link()) and told["dashboard"] == "http://127.0.0.1:1/"
        owner.links.recipe = small("seed=4", "run_id=another", "datasets=[{source: files, path: texts}]")
        assert owner.links.has_another_link()
        owner.links.tell()
        assert re.search("/another/.*\nA link brings no data: .* copy of texts", (owner.home.path / LINK).read_text())
    assert not (owner.home.path / "peer.json").exists() and (owner.home.path / LINK).exists()
    with peer(tmp_path / "a", "monitor", "datasets=[{source: files, path: /srv/texts}]") as owner:
        assert owner.link() is None and "datasets.0.path leads out" in owner.no_link
        owner.links.tell()
        assert not (owner.home.path / LINK).exists()
    with peer(tmp_path / "b", "monitor", "local.client_mode=true") as alone:
        assert alone.link() is None and "nobody can dial it" in alone.no_link
