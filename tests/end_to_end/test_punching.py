"""Peers behind routers that really translate leave their relay for a direct connection, or stay with it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from benchmarks._homes import (
    DUAL_STACK,
    FILTERED,
    FULLY_RANDOM,
    IPV6_ONLY,
    MASQUERADE,
    RANDOM,
    Internet,
    Machine,
    Router,
    RouterKind,
)
from tests.suites import soak

pytestmark = pytest.mark.homes

SECONDS = "60"  # seconds to wait for the direct connection, which is used as soon as it is there, on a busy machine
IN_VAIN = "12"  # seconds, longer than three tries take


class Peer:
    def __init__(self, place: Machine, *words: str) -> None:
        command = [sys.executable, "-m", "tests.reach.punching_peer", *words]
        self._process = place.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def says(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def tell(self, *words: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()

    def ask(self, *words: str) -> Any:
        self.tell(*words)
        return self.says()


class Scene:
    """A relay, another listener, and two homes behind these routers."""

    def __init__(self, internet: Internet, *routers: Router) -> None:
        self.internet = internet
        publics = [Peer(internet.machine(name), "relay", name) for name in ("relay", "other")]
        found = [public.says() for public in publics]
        listeners = [address for addresses in zip(*found, strict=True) for address in addresses]
        self.homes = [
            Peer(router.machine(name), "home", name, *self._fitting(router, listeners))
            for name, router in zip(("ann", "ben"), routers, strict=True)
        ]
        for home in self.homes:
            home.says()

    def _fitting(self, router: Router, listeners: list[str]) -> list[str]:
        ours = {":" in address for address in router.outside}
        return [address for address in listeners if ("[" in address) in ours][:2]

    def meet(self, seconds: str = SECONDS) -> Any:
        ann, ben = self.homes
        ben.tell("meet", "ann", seconds)
        ways = [ann.ask("meet", "ben", seconds), ben.says()]
        assert ways[0]["way"] == ways[1]["way"]
        return ways


def scene(internet: Internet, north: RouterKind, south: RouterKind) -> Scene:
    return Scene(internet, internet.router("north", north), internet.router("south", south))


@pytest.mark.parametrize(
    ("north", "south"),
    [(MASQUERADE, MASQUERADE), *soak([(MASQUERADE, FILTERED), (IPV6_ONLY, IPV6_ONLY), (DUAL_STACK, DUAL_STACK)])],
    ids=lambda kind: kind.name,
)
def test_homes_whose_routers_show_a_port_to_everyone_alike_connect_directly(
    internet: Internet, north: RouterKind, south: RouterKind
) -> None:
    homes = scene(internet, north, south)
    assert [met["way"] for met in homes.meet()] == ["punched"] * 2
    sent = homes.homes[0].ask("stream", "ben", "4")
    assert sent["error"] == "" and not sent["relayed"]


@pytest.mark.parametrize(
    ("north", "south"), [(RANDOM, MASQUERADE), *soak([(FULLY_RANDOM, RANDOM)])], ids=lambda kind: kind.name
)
def test_a_router_that_shows_each_connection_at_another_port_leaves_the_relay(
    internet: Internet, north: RouterKind, south: RouterKind
) -> None:
    homes = scene(internet, north, south)
    met = homes.meet(IN_VAIN)
    assert [each["way"] for each in met] == ["relayed"] * 2
    assert "dependent" in [each["translation"]["IPv4"] for each in met]
    sent = homes.homes[1].ask("stream", "ann", "4")
    assert sent["error"] == "" and sent["relayed"]


def test_a_direct_path_that_is_cut_comes_back_over_the_relay(internet: Internet) -> None:
    north, south = (internet.router(name, MASQUERADE) for name in ("north", "south"))
    homes = Scene(internet, north, south)
    assert homes.meet()[0]["way"] == "punched"
    ann, _ = homes.homes
    # Between the two homes nothing passes any more, and nobody is told; each still reaches the relay.
    internet.sh(f"nft add rule inet cuts passing ip saddr {north.outside[0]} ip daddr {south.outside[0]} drop")
    lost = ann.ask("call", "ben")
    assert lost["error"] == "ConnectionLost" and lost["seconds"] < 20
    assert ann.ask("call", "ben") | {"seconds": 0} == {"way": "relayed", "error": "", "seconds": 0}
