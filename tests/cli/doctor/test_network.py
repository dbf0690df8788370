"""What doctor says of this computer's line, without peers and among them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarmcli.cli.doctor import network, run
from swarmcli.cli.doctor.finding import Context
from swarmcli.network.addresses import Scope
from swarmcli.peer.home import Home
from swarmcli.peer.joining import join_run
from swarmcli.recipe import parse_link
from tests.recipe.recipes import small


@pytest.mark.parametrize(
    ("scope", "outer", "asked", "words"),
    [
        (None, "", True, "connected to no network"),
        (Scope.HOST, "", True, "connected to no network"),
        (Scope.INTERNET, "", True, "unless a firewall stops them"),
        (Scope.LAN, "", True, "opens no port for it"),
        (Scope.LAN, "", False, "was not asked for a port"),
        (Scope.LAN, "203.0.113.7", True, "others can probably dial it"),
        (Scope.LAN, "2a00::1", True, "others can probably dial it"),
        (Scope.LAN, "192.168.0.2", True, "behind two routers"),
        (Scope.LAN, "100.64.0.2", True, "behind two routers"),
    ],
)
def test_without_peers_it_says_no_more_than_it_knows(scope: Scope, outer: str, asked: bool, words: str) -> None:
    found = network.alone(scope, outer, asked=asked)
    assert words in found.text and (found.outcome == "WARN") == bool(found.fix) == ("no network" in words)


def test_without_a_run_the_router_is_named_and_asked_for_nothing_where_nobody_wants_that() -> None:
    reach, listening, router = asyncio.run(network.look_around(0, port_mapping=False))
    assert reach.check == "reach" and "tcp://" in listening.text and router.text.endswith("not asked for a port")


def test_the_peers_of_a_run_tell_who_can_dial_in_and_how_fast_the_line_is(tmp_path: Path) -> None:
    (skipped,) = network.check_network(Context())
    assert skipped.outcome == "SKIP" and "--network" in skipped.text
    recipe = small("local.host=127.0.0.1", f"output_dir={tmp_path}", directory=tmp_path)
    with join_run(recipe, "monitor", Home.at(tmp_path / "monitor")) as peer:
        link = peer.link()
        assert link is not None
        context = Context(target=str(link), network=True, link=parse_link(str(link)))
        (unreached,) = network.check_network(context)
        assert unreached.outcome == "SKIP" and "no contact" in unreached.text
        list(run.check_contacts(context))
        found = {each.check: each.text for each in network.check_network(context)}
    assert "dial" in found["IPv4"] and "router" in found
    assert found["rates"].startswith(f"{peer.peer_id.short}: ") and found["rates"].endswith("bit/s up")
    assert context.uplink is not None and context.uplink > 0
