"""The routers of benchmarks/_homes.py do what they are named after."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks._homes import FILTERED, FULLY_RANDOM, IPV6_ONLY, MASQUERADE, RANDOM, Internet, Machine

pytestmark = pytest.mark.homes

PORT = 7000
LISTEN = f"""
import socket
listener = socket.create_server(("::", {PORT}), family=socket.AF_INET6, dualstack_ipv6=True)
print("listening", flush=True)
while True:
    connection, seen = listener.accept()
    connection.sendall(f"{{seen[0].removeprefix('::ffff:')}} {{seen[1]}}".encode())
    connection.close()
"""
# Prints its own port, and where the listener sees it.
DIAL = f"""
import socket, sys
with socket.create_connection((sys.argv[1], {PORT}), timeout=float(sys.argv[2])) as connection:
    connection.settimeout(60)
    print(connection.getsockname()[1], connection.recv(100).decode())
"""


def listen(machine: Machine) -> str:
    process = machine.start([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"listening\n"
    return machine.address


def dial(machine: Machine, address: str, seconds: float = 60.0) -> tuple[int, str, int]:
    port, seen, seen_port = machine.run([sys.executable, "-c", DIAL, address, str(seconds)]).stdout.split()
    return int(port), seen, int(seen_port)


def is_silent(machine: Machine, address: str) -> bool:
    return "timed out" in trouble(machine, address)


def trouble(machine: Machine, address: str) -> str:
    try:
        dial(machine, address, 1.0)
    except subprocess.CalledProcessError as error:
        return str(error.stderr)
    return ""


def test_routers_translate_filter_and_forward_as_their_kinds_say(internet: Internet) -> None:
    public = internet.machine("public")
    contact = listen(public)
    masquerade, filtered = internet.router("masquerade", MASQUERADE), internet.router("filtered", FILTERED)
    home, open_home = masquerade.machine("home"), filtered.machine("open home")
    port, *seen = dial(home, contact)
    assert home.address == "192.168.1.2" and seen == [masquerade.outside[0], port]
    for kind in (RANDOM, FULLY_RANDOM):
        router = internet.router(kind.name, kind)
        asked = [dial(router.machine(f"{kind.name} {number}"), contact) for number in range(2)]
        assert all(host == router.outside[0] and at != own for own, host, at in asked)
    assert dial(open_home, contact)[1] == listen(open_home)
    assert is_silent(public, open_home.address) and is_silent(home, "9.9.9.9")
    filtered.forward(open_home, PORT)
    for address in open_home.addresses:
        dial(public, address)
    ipv6 = internet.router("ipv6", IPV6_ONLY).machine("ipv6")
    assert dial(ipv6, public.addresses[1])[1] == listen(ipv6)
    assert is_silent(public, ipv6.address)
    assert is_silent(public, masquerade.outside[0])
    masquerade.forward(home, PORT)
    listen(home)
    dial(public, masquerade.outside[0])
    # There the address is the router's own, where nobody listens.
    assert "refused" in trouble(masquerade.machine("neighbour"), masquerade.outside[0])
