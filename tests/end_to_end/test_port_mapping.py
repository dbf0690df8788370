"""Ports at a router in a network namespace, which really translates: others dial them, or cannot."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from benchmarks._homes import Internet, Machine, Router
from tests.end_to_end.swarm import Swarm
from tests.suites import soak

pytestmark = pytest.mark.homes

OPEN = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3]))"
SILENT = 2.0  # seconds after which nothing is expected any more


def start_gateway(router: Router, *words: str) -> None:
    command = [sys.executable, "-m", "tests.reach.gateway", *words]
    process = router.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


@pytest.mark.parametrize("protocol", ["NAT-PMP", *soak(["UPnP"])])
def test_a_peer_behind_a_router_that_opens_ports_is_dialed_and_gives_its_port_back_at_ctrl_c(
    internet: Internet, swarm: Callable[..., Swarm], protocol: str
) -> None:
    """And with --no-port-mapping it does not ask."""
    world = swarm(1000, host="0.0.0.0")
    public, router = internet.machine("public"), internet.router("router")
    outer = router.outside[0]
    start_gateway(router, "--outer", outer, "--speaks", protocol)
    world.start_contact("monitor", "public", "--port", "0", "--web", "0", prefix=public.prefix)
    quiet = ("--port", "0", "--web", "0")
    shy = world.start("monitor", "shy", *quiet, "--no-port-mapping", prefix=router.machine("shy").prefix)
    world.wait(lambda: "others cannot dial" in reach(world, "shy"), "it knows that nobody can dial it", shy)
    home = world.start("monitor", "home", *quiet, prefix=router.machine("home").prefix)
    world.wait(lambda: "port that its router has opened" in reach(world, "home"), "others can dial it", home)
    port = int(reach(world, "home").partition(f"{outer}:")[2].partition(",")[0])
    assert opens(public, outer, port)
    assert "others cannot dial" in reach(world, "shy")
    home.ask_to_stop()
    world.wait_for_end(home)
    assert not opens(public, outer, port, SILENT)


def reach(world: Swarm, name: str) -> str:
    """What the peer last found out about who can dial it; "" before it has found out anything."""
    return next((event.text for event in reversed(world.events(name)) if event.kind == "reach"), "")


def opens(dialer: Machine, host: str, port: int, seconds: float = 60.0) -> bool:
    words = [sys.executable, "-c", OPEN, host, str(port), str(seconds)]
    return dialer.run(words, check=False).returncode == 0
