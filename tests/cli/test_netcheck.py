"""What `swarm netcheck` prints of a report: for people a sentence and what it rests on, for programs all of it."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from swarmcli.cli.netcheck import options_of, report
from swarmcli.network.addresses import Scope
from swarmcli.peer.netcheck import FamilyReport, LinkReport, MappingReport, NetReport, alone_in_words
from swarmcli.recipe import load_recipe, parse_link

MAPPED = FamilyReport(
    family="IPv4", dialable=True, scope="internet", how="mapped", addresses=("tcp://203.0.113.7:31330",),
    seen="tcp://203.0.113.7:40001", translation="independent",
)  # fmt: skip
FOUND = NetReport(
    sentence="others can dial this peer at tcp://203.0.113.7:31330, by a port that its router has opened for it",
    listening=("tcp://192.168.1.2:31330",),
    families=(
        MAPPED,
        FamilyReport(family="IPv6", dialable=False, scope="internet", how="asked in vain", translation="dependent"),
    ),
    mapping=MappingReport(gateway="192.168.1.1", method="UPnP", address="203.0.113.7:31330"),
    peers=(
        LinkReport(peer="k7q2m4xw5z", address="tcp://198.51.100.4:31330", round_trip=0.023, down=5e6, up=0.8e6),
        LinkReport(peer="abcdefghij", relayed=True, relays=True, problem="busy\x1b[2J"),
    ),
    clock_offset=-1.25,
)


def shown(found: NetReport, width: int = 120) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, highlight=False, markup=False).print(report(found))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_the_sentence_comes_first_and_everything_that_was_found_below() -> None:
    lines = shown(FOUND)
    assert lines[1].startswith("Others can dial this peer at tcp://203.0.113.7:31330, by a port")
    text = "\n".join(lines)
    for words in (
        "IPv4        can be dialed from the internet, contacts dialed the port of its router",
        "seen as tcp://203.0.113.7:40001; translated, to one port for all",
        "IPv6        cannot be dialed from the internet, no contact's dial came in",
        "translated, to another port for each",
        "router      192.168.1.1, opened 203.0.113.7:31330 over UPnP",
        "clock       1.2 s ahead of the swarm's",
        "23 ms  40 Mbit/s  6.4 Mbit/s",
        "over a relay",
        "relay; busy[2J",
    ):
        assert words in text
    assert "\x1b" not in text and max(map(len, shown(FOUND, 60))) <= 60
    for mapping, said in (
        (MappingReport(), "none found, opens no port"),
        (MappingReport(gateway="192.168.1.1", asked=False), "192.168.1.1, not asked for a port"),
        (MappingReport(gateway="192.168.1.1", problem="NAT-PMP: no; UPnP: never"), "192.168.1.1, opens no port"),
    ):
        assert said in "\n".join(shown(replace(FOUND, mapping=mapping)))
    found = json.loads(json.dumps(FOUND.as_json()))
    assert found["families"][0]["translation"] == "independent" and found["sentence"] == FOUND.sentence
    assert found["peers"][0]["down"] == 5e6


@pytest.mark.parametrize(
    ("scope", "address", "asked", "words"),
    [
        (None, "", True, "connected to no network"),
        (Scope.HOST, "", True, "connected to no network"),
        (Scope.INTERNET, "", True, "unless a firewall stops them"),
        (Scope.LAN, "", True, "opens no port for it"),
        (Scope.LAN, "", False, "was not asked for a port"),
        (Scope.LAN, "203.0.113.7:31330", True, "others can probably dial it"),
        (Scope.LAN, "[2a00::1]:31330", True, "others can probably dial it"),
        (Scope.LAN, "192.168.0.2:31330", True, "behind two routers"),
        (Scope.LAN, "100.64.0.2:31330", True, "behind two routers"),
    ],
)
def test_without_peers_it_says_no_more_than_it_knows(scope: Scope, address: str, asked: bool, words: str) -> None:
    assert words in alone_in_words(scope, MappingReport(gateway="192.168.1.1", address=address, asked=asked))


def test_a_link_names_whom_to_ask_and_a_recipe_how_to_listen_too(tmp_path: Path) -> None:
    peer = "a" * 52
    link = f"swarm://{peer}@203.0.113.7:31330,198.51.100.4:1/run?fingerprint={'a' * 32}"
    assert options_of(parse_link(link), ())["initial_peers"] == [
        f"tcp://203.0.113.7:31330/{peer}",
        f"tcp://198.51.100.4:1/{peer}",
    ]
    assert options_of(None, ["tcp://203.0.113.7:1"])["initial_peers"] == ["tcp://203.0.113.7:1"]
    recipe = tmp_path / "recipe.yaml"
    text = (Path(__file__).parents[2] / "recipes" / "stdlib-lm.yaml").read_text()
    recipe.write_text(text + "\nnetwork: {initial_peers: ['tcp://203.0.113.9:31330']}\n")
    found = options_of(load_recipe(recipe), ())
    assert found["initial_peers"] == ["tcp://203.0.113.9:31330"]
    assert (found["port_mapping"], found["client_mode"]) == (True, False)
