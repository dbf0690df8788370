"""`swarm netcheck` in homes behind routers of several kinds, with public contacts in unlike networks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from benchmarks._homes import MASQUERADE, Internet, Machine
from tests.end_to_end.test_port_mapping import SILENT, answers_at, start_gateway

pytestmark = pytest.mark.homes


def start_contacts(internet: Internet, count: int) -> list[str]:
    """Public peers that know each other; returns their addresses."""
    found: list[str] = []
    for number in range(count):
        machine = internet.machine(f"contact {number}")
        command = [sys.executable, "-m", "tests.end_to_end.contact", *found[:1]]
        process = machine.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        address, peer = process.stdout.readline().split()
        found.append(f"{address}/{peer}")
    return found


def netcheck(home: Machine, *words: str) -> dict[str, Any]:
    done = home.run([sys.executable, "-m", "swarmcli", "netcheck", "--json", *words], timeout=300)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def ipv4(found: dict[str, Any]) -> dict[str, Any]:
    return next(each for each in found["families"] if each["family"] == "IPv4")


def test_a_port_of_the_router_makes_a_home_dialable_and_is_given_back(internet: Internet) -> None:
    contacts = start_contacts(internet, 3)
    router = internet.router("router", MASQUERADE, mbit=20)
    outer = router.outside[0]
    start_gateway(router, "--outer", outer)
    found = netcheck(router.machine("home"), *(word for each in contacts for word in ("--peer", each)))
    verdict = ipv4(found)
    assert (verdict["dialable"], verdict["how"]) == (True, "mapped")
    assert verdict["translation"] == "independent"
    assert found["mapping"]["address"].startswith(f"{outer}:")
    assert "port that its router has opened" in found["sentence"]
    rates = [peer for peer in found["peers"] if peer["up"] and peer["down"]]
    assert len(rates) == 3
    for peer in rates:  # the link carries 2.5 MB/s each way, less what a busy machine loses, or takes late at the start
        assert 3e5 < peer["up"] < 5e6
        assert 3e5 < peer["down"] < 5e6
    port = int(found["mapping"]["address"].rpartition(":")[2])
    assert not answers_at(internet.machine("late"), outer, port, SILENT)
