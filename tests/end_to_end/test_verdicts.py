"""What peers behind real routers find out about themselves: processes in network namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks._homes import DUAL_STACK, FILTERED, FULLY_RANDOM, IPV6_ONLY, MASQUERADE, Internet, Machine

pytestmark = pytest.mark.homes

PORT = 7000
# Seconds until a change is noticed: a peer of whom others say that it is elsewhere asks 120 s after it asked last.
SECONDS = 240.0
# Says what it knows when it has started, and again for every line that it is given.
PEER = f"""
import json, sys, time
from swarmcli.dht import DHT

began = time.monotonic()
dht = DHT(sys.argv[1:], start=True, port={PORT}, port_mapping=False, startup_timeout=30)
seconds = time.monotonic() - began

def say():
    verdicts = {{each.family: [each.dialable, each.how, list(each.addresses)] for each in dht.reach.verdicts}}
    print(json.dumps(dict(seconds=seconds, client=dht.client_mode, said=dht.reach.sentence(), verdicts=verdicts,
        addresses=dht.get_visible_addresses())), flush=True)

say()
for line in sys.stdin:
    say()
"""


class Peer:
    """A process with a DHT on a machine of that internet."""

    def __init__(self, machine: Machine, *contacts: str) -> None:
        command = [sys.executable, "-c", PEER, *contacts]
        self._process = machine.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def hears(self) -> dict[str, Any]:
        """Its next report; the first one tells of its start."""
        found = json.loads(self._process.stdout.readline())  # type: ignore[union-attr]
        assert isinstance(found, dict)
        return found

    def says(self) -> dict[str, Any]:
        """Its report of what it knows now."""
        print("now", file=self._process.stdin, flush=True)
        return self.hears()

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Asks for reports until the condition holds of one, and returns that."""
        deadline = time.monotonic() + SECONDS
        while not condition(said := self.says()):
            assert time.monotonic() < deadline, said
            time.sleep(0.2)
        return said


def test_each_peer_finds_out_by_itself_where_it_stands(internet: Internet) -> None:
    public = Peer(internet.machine("public"))
    first = public.hears()
    assert first["verdicts"] == {
        "IPv4": [True, "assumed", [f"tcp://5.1.0.1:{PORT}"]],
        "IPv6": [True, "assumed", [f"tcp://[2a00:1::1]:{PORT}"]],
    }
    contact, contact_v6 = first["addresses"]
    second = Peer(internet.machine("second"), contact).hears()
    assert not second["client"] and f"tcp://5.2.0.1:{PORT}" in second["said"] + str(second["addresses"])

    closed = {}
    for kind in (MASQUERADE, FULLY_RANDOM, FILTERED, DUAL_STACK):
        router = internet.router(kind.name, kind)
        closed[kind.name] = Peer(router.machine(f"behind {kind.name}"), contact)
    closed["ipv6"] = Peer(internet.router("ipv6", IPV6_ONLY).machine("behind ipv6"), contact_v6)
    forwarding, opened = internet.router("forwarding"), internet.router("opened", FILTERED)
    forwarded, lets_in = forwarding.machine("forwarded"), opened.machine("lets in")
    forwarding.forward(forwarded, PORT)
    opened.forward(lets_in, PORT)
    home, dual = Peer(forwarded, contact), Peer(lets_in, contact)
    for peer in (*closed.values(), home, dual):
        peer.hears()
    for peer in closed.values():
        said = peer.until(lambda said: any(each[:2] == [False, "asked in vain"] for each in said["verdicts"].values()))
        assert said["client"] and not said["addresses"], said
    outer = f"tcp://{forwarding.outside[0]}:{PORT}"
    found = home.until(lambda said: said["verdicts"]["IPv4"] == [True, "dialed back", [outer]])
    assert not found["client"]
    both = [f"/{lets_in.addresses[0]}:{PORT}", f"/[{lets_in.addresses[1]}]:{PORT}"]
    dual.until(lambda said: [each.partition("/")[2].rpartition("/")[0] for each in said["addresses"]] == both)
    public.until(lambda said: said["verdicts"]["IPv4"][1] == "dialed from outside")

    # The router gets another outer address: its contacts see the home there, and it asks anew.
    forwarding.move()
    moved = f"tcp://{forwarding.outside[0]}:{PORT}"
    assert moved != outer
    home.until(lambda said: said["verdicts"]["IPv4"] == [True, "dialed back", [moved]])
