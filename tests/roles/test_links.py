"""Which link a peer has, over real TCP: its own, or its contact's."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from swarmcli.errors import ListenError
from swarmcli.optim.config import Role
from swarmcli.recipe import fingerprint_of
from swarmcli.roles.home import Home
from swarmcli.roles.offering import fetch_recipe
from swarmcli.roles.peer import LINK, PORT, RunPeer
from tests.recipe.recipes import small


def peer(home: Path, role: Role, *overrides: str, contacts: tuple[str, ...] = ()) -> RunPeer:
    recipe = small("local.host=127.0.0.1", f"output_dir={home}", *overrides, directory=home)
    return RunPeer(recipe, role, Home.at(home / role), contacts=contacts)


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


def test_a_peer_listens_where_it_did_in_its_last_life_unless_that_port_is_taken(tmp_path: Path) -> None:
    def life(*overrides: str) -> int:
        living = peer(tmp_path, "auxiliary", *overrides)
        with living.home, living:
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


async def lost(client: RunPeer, other: RunPeer) -> None:
    await client.dht.endpoint.lost(other.peer_id)


def test_a_peer_whose_contact_has_left_points_to_another_and_finds_back_by_those_it_knew(tmp_path: Path) -> None:
    wish = "local.client_mode=true"
    with ExitStack() as exits:
        owner, leave = peer(tmp_path / "a", "monitor"), exits.enter_context(ExitStack())
        leave.enter_context(owner)
        contact = owner.dht.get_visible_addresses()[0]
        other = exits.enter_context(peer(tmp_path / "b", "auxiliary", contacts=(contact,)))
        with peer(tmp_path / "c", "trainer", wish, contacts=(contact,)) as client:
            where = other.dht.get_visible_addresses()[0]
            client.dht.run_coroutine(client.dht.endpoint.connect(where, timeout=10.0))
            client.others_of_run = lambda: [other.peer_id]
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
            RunPeer(recipe, "auxiliary", first, contacts=gone) as beside,
        ):
            beside.tell()
            leaving.close()
            with RunPeer(recipe, "auxiliary", second, contacts=gone) as late:
                assert late.dht.run_coroutine(connected(late, beside))


async def connected(client: RunPeer, other: RunPeer) -> bool:
    return client.dht.endpoint.is_connected(other.peer_id)


def test_the_link_is_left_in_the_home_and_told_anew_when_it_changes(tmp_path: Path) -> None:
    with peer(tmp_path, "monitor") as owner:
        assert owner.has_another_link()
        owner.tell("http://127.0.0.1:1/")
        assert not owner.has_another_link()
        told = json.loads((owner.home.path / "peer.json").read_text())
        assert told["link"] == str(owner.link()) and told["dashboard"] == "http://127.0.0.1:1/"
        owner.recipe = small("seed=4", "run_id=another")
        assert owner.has_another_link()
        owner.tell()
        assert "/another?" in (owner.home.path / LINK).read_text()
    assert not (owner.home.path / "peer.json").exists() and (owner.home.path / LINK).exists()


def test_a_recipe_that_cannot_travel_leaves_its_peer_without_a_link_and_says_why(tmp_path: Path) -> None:
    with peer(tmp_path, "monitor", "datasets=[{type: files, path: /srv/texts}]") as owner:
        assert owner.link() is None and "datasets.0.path leads out" in owner.no_link
        owner.tell()
        assert not (owner.home.path / LINK).exists()


def test_a_client_without_contacts_that_others_can_dial_has_none(tmp_path: Path) -> None:
    with peer(tmp_path, "monitor", "local.client_mode=true") as alone:
        assert alone.link() is None and "nobody can dial it" in alone.no_link
