"""`swarm doctor --network` in homes behind routers of several kinds, with public contacts in unlike networks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._homes import MASQUERADE, Internet, Machine
from tests.end_to_end.test_port_mapping import SILENT, opens, start_gateway

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


def look_around(home: Machine, *words: str) -> dict[str, list[str]]:
    """Returns check → the texts that `swarm doctor --network` prints of it."""
    done = home.run([sys.executable, "-m", "swarmcli", "doctor", "--network", "--json", *words], timeout=300)
    found: dict[str, list[str]] = {}
    for finding in map(json.loads, done.stdout.splitlines()):
        found.setdefault(finding["check"], []).append(finding["text"])
    return found


def test_a_port_of_the_router_makes_a_home_dialable_and_is_given_back(
    internet: Internet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("SWARM_RUNTIME_DIR", str(tmp_path / "runtime"))  # else it looks at peers of other tests, too
    contacts = start_contacts(internet, 3)
    router = internet.router("router", MASQUERADE, mbit=20)
    outer = router.outside[0]
    start_gateway(router, "--outer", outer)
    found = look_around(router.machine("home"), *(word for each in contacts for word in ("--peer", each)))
    assert "port that its router has opened" in found["reach"][0]
    (ipv4,) = found["IPv4"]
    assert ipv4.startswith("can be dialed from the internet, contacts dialed the port of its router, at tcp://")
    opened = re.search(rf"opened {re.escape(outer)}:(\d+) over", found["router"][0])
    assert opened is not None
    rates = [re.search(r"([\d.]+) Mbit/s down, ([\d.]+) Mbit/s up", text) for text in found["rates"]]
    assert len(rates) == 3
    # The line carries 20 Mbit/s each way, less what a busy machine loses, or takes late at the start.
    for down_up in rates:
        assert down_up is not None and all(2.4 < float(rate) < 40 for rate in down_up.groups())
    assert not opens(internet.machine("late"), outer, int(opened[1]), SILENT)
