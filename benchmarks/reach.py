"""How two peers behind routers of several kinds reach each other: directly, through both routers at once ("punched"),
or over a relay; how long that takes, and how fast a stream between them is beside a plain TCP stream in the same place.

Every peer is a process in a home of its own (network namespaces; see _homes.py), all on one internet with one public
peer that relays. Both peers of a pair know of each other what a record in the hash table would say. The plain stream
goes through the same two routers, by a port that is opened for it alone.

    python -m benchmarks reach
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

import msgspec

import swarmcli
from benchmarks import _homes as homes
from swarmcli.errors import NetworkError
from swarmcli.network import PeerID
from swarmcli.network.endpoint import Endpoint, Stream

MIB = 1 << 20
MBIT = 40.0  # of each home, both ways
DELAY = 0.01  # seconds from one home to another
TOTAL = 8 * MIB
MESSAGE = 512 * 1024  # bytes; the default part of an all-reduce
CONNECT_SECONDS = 30.0
# After the first answer: punching has three tries in this time, or it does not work.
PUNCH_SECONDS = 15.0
SETTLE_SECONDS = 60.0
PORT = 31330  # of every peer; forwarded or not
PLAIN_PORT = 7000


class Size(msgspec.Struct, frozen=True):
    bytes: int


# ---- one peer: commands come as lines of JSON, and so do its answers


class Peer:
    def __init__(self, contacts: list[str]) -> None:
        """Without contacts it is the first one, and relays."""
        began = time.monotonic()
        self._dht = swarmcli.DHT(contacts, start=True, port=PORT, relay=not contacts)
        self.seconds = time.monotonic() - began
        self._dht.run_coroutine(self._serve)

    async def _serve(self, dht: swarmcli.DHT, node: Any) -> None:
        node.endpoint.serve("bench.echo", Size, self._echo)
        node.endpoint.serve_stream("bench.sink", Size, self._sink)

    async def _echo(self, peer: PeerID, request: Size) -> Size:
        return request

    async def _sink(self, peer: PeerID, request: Size, stream: Stream) -> None:
        memory = memoryview(bytearray(MESSAGE))
        received = 0
        while received < request.bytes:
            _, payload = await stream.receive(Size, lambda message, size: memory[:size])
            received += payload.nbytes
        await stream.send(Size(received))

    def obey(self) -> None:
        for line in sys.stdin:
            command = json.loads(line)
            name = command.pop("do")
            try:
                answer = getattr(self, name)(**command)
            except (NetworkError, OSError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)

    def place(self) -> dict[str, Any]:
        """Returns who this is and where it can be reached, once it can be."""
        endpoint = self._dht.endpoint
        waited = wait(lambda: bool(endpoint.addresses), SETTLE_SECONDS)
        return {
            "peer": bytes(endpoint.peer_id).hex(),
            "addresses": endpoint.addresses,
            "visible": self._dht.get_visible_addresses(),
            "seconds": self.seconds + waited,
        }

    def dial(self, peer: str, addresses: list[str]) -> dict[str, Any]:
        other = PeerID(bytes.fromhex(peer))
        met = self._dht.endpoint.is_connected(other)
        seconds = self._dht.run_coroutine(lambda dht, node: self._dial(node.endpoint, other, tuple(addresses)))
        relayed = is_relayed(self._dht.endpoint, other)
        waited = wait(lambda: not is_relayed(self._dht.endpoint, other), PUNCH_SECONDS)
        now = is_relayed(self._dht.endpoint, other)
        way = "relayed" if now else "punched" if relayed else "direct"
        return {"met": met, "connect": seconds, "way": way, "direct": None if now else seconds + waited}

    async def _dial(self, endpoint: Endpoint, peer: PeerID, addresses: tuple[str, ...]) -> float:
        endpoint.learn(peer, addresses)
        began = time.monotonic()
        await endpoint.call(peer, "bench.echo", Size(1), Size, timeout=CONNECT_SECONDS)
        return time.monotonic() - began

    def stream(self, peer: str) -> dict[str, Any]:
        other = PeerID(bytes.fromhex(peer))
        return dict(self._dht.run_coroutine(lambda dht, node: self._stream(node.endpoint, other)))

    async def _stream(self, endpoint: Endpoint, peer: PeerID) -> dict[str, Any]:
        memory = memoryview(bytearray(MESSAGE))
        async with endpoint.stream(peer, "bench.sink", Size(TOTAL), timeout=CONNECT_SECONDS) as stream:
            began = time.perf_counter()
            for _ in range(TOTAL // MESSAGE):
                await stream.send(Size(MESSAGE), memory)
            await stream.receive(Size)
            return {"rate": TOTAL / (time.perf_counter() - began)}


def wait(condition: Callable[[], bool], seconds: float) -> float:
    """Waits until the condition holds, or so many seconds have passed; returns how many seconds it waited."""
    began = time.monotonic()
    while not condition() and time.monotonic() < began + seconds:
        time.sleep(0.02)
    return time.monotonic() - began


def is_relayed(endpoint: Endpoint, peer: PeerID) -> bool:
    seen = endpoint.seen(peer)
    return seen is None or seen.relayed


# ---- a plain stream


def listen_plain() -> None:
    with socket.create_server(("::", PLAIN_PORT), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        print("listening", flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                memory, received = bytearray(MESSAGE), 0
                while received < TOTAL and (size := connection.recv_into(memory)):
                    received += size
                connection.sendall(b"!")


def dial_plain(host: str) -> None:
    with socket.create_connection((host, PLAIN_PORT), timeout=CONNECT_SECONDS) as connection:
        began = time.perf_counter()
        for _ in range(TOTAL // MESSAGE):
            connection.sendall(bytes(MESSAGE))
        connection.recv(1)
        print(TOTAL / (time.perf_counter() - began))


# ---- the homes and the table


@dataclass
class Home:
    kind: str
    machine: homes.Machine
    outside: tuple[str, ...]  # where its opened port is reached
    process: subprocess.Popen[str]

    def ask(self, do: str, **options: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **options}) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the peer in {self.machine.name} has ended")
        return dict(json.loads(answer))


KINDS = ("public", "forwarded", "filtered", "masquerade", "random", "double", "ipv6 only")


def make_home(internet: homes.Internet, kind: str, number: int, contacts: list[str]) -> Home:
    name = f"{kind} {number}"
    if kind == "public":
        machine = internet.machine(name, mbit=MBIT)
        outside = machine.addresses
    else:
        router = make_router(internet, kind, name)
        machine = router.machine(f"home of {name}")
        router.forward(machine, PLAIN_PORT)
        if kind == "forwarded":
            router.forward(machine, PORT)
        outside = machine.addresses if router.kind.translation is None else router.site.addresses
    return Home(kind, machine, outside, start_peer(machine, contacts))


def make_router(internet: homes.Internet, kind: str, name: str) -> homes.Router:
    match kind:
        case "double":
            carrier = internet.router(f"carrier of {name}", lan="100.64.0", mbit=MBIT)
            return internet.router(name, behind=carrier)
        case "filtered":
            return internet.router(name, homes.FILTERED, mbit=MBIT)
        case "random":
            return internet.router(name, homes.FULLY_RANDOM, mbit=MBIT)
        case "ipv6 only":
            return internet.router(name, homes.IPV6_ONLY, mbit=MBIT)
        case _:
            return internet.router(name, homes.MASQUERADE, mbit=MBIT)


def start_peer(machine: homes.Machine, contacts: list[str]) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "benchmarks.reach", "peer", *contacts]
    return machine.start(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def measure_pair(first: Home, second: Home) -> dict[str, Any]:
    """The first dials the second, as if it had never met it."""
    place = second.ask("place")
    found = first.ask("dial", peer=place["peer"], addresses=place["addresses"])
    if "error" not in found:
        found |= first.ask("stream", peer=place["peer"])
    return found | {"plain": measure_plain(first, second)}


def measure_plain(first: Home, second: Home) -> float | None:
    """Bytes per second of a TCP stream from the first to the second; None: they have no kind of address in common."""
    ours = {":" in address for address in first.machine.addresses}
    common = [address for address in second.outside if (":" in address) in ours]
    if not common:
        return None
    listener = second.machine.start([sys.executable, "-m", "benchmarks.reach", "listen"], stdout=subprocess.PIPE)
    assert listener.stdout is not None
    listener.stdout.readline()
    try:
        dial = first.machine.run([sys.executable, "-m", "benchmarks.reach", "dial", common[0]])
        return float(dial.stdout)
    finally:
        homes.kill(listener)


def rows(internet: homes.Internet) -> Iterator[str]:
    relay = Home("relay", machine := internet.machine("relay", mbit=4 * MBIT), (), start_peer(machine, []))
    contacts = relay.ask("place")["visible"]
    ends = [[make_home(internet, kind, number, contacts) for kind in KINDS] for number in (1, 2)]
    for home in (*ends[0], *ends[1]):
        place = home.ask("place")
        yield f"    {home.machine.name}: {', '.join(place['addresses']) or 'nowhere'} after {place['seconds']:.1f} s"
    yield "| dials | is dialed | how | first answer | direct after | MB/s | plain TCP | share |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for first, second in combinations_with_replacement(range(len(KINDS)), 2):
        yield row(ends[0][first], ends[1][second])


def row(first: Home, second: Home) -> str:
    found = measure_pair(first, second)
    if "error" in found:
        return f"| {first.kind} | {second.kind} | {found['error']} | | | | | |"
    plain = found["plain"]
    return " | ".join(
        (
            f"| {first.kind}",
            second.kind,
            found["way"],
            "had met" if found["met"] else f"{found['connect']:.2f} s",
            "" if found["direct"] is None or found["met"] else f"{found['direct']:.2f} s",
            f"{found['rate'] / 1e6:.2f}",
            "" if plain is None else f"{plain / 1e6:.2f}",
            "" if plain is None else f"{found['rate'] / plain:.2f}",
            "",
        )
    )


def main() -> None:
    if why := homes.missing():
        print(f"skipped: {why}")
        return
    print(f"homes of {MBIT:g} Mbit/s each way, the relay has {4 * MBIT:g}; {DELAY * 1000:g} ms from one to another")
    print(f"{TOTAL // MIB} MiB through each stream")
    with homes.Internet(delay=DELAY) as internet:
        for line in rows(internet):
            print(line, flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["peer", *contacts]:
            Peer(contacts).obey()
        case ["listen"]:
            listen_plain()
        case ["dial", host]:
            dial_plain(host)
        case _:
            main()
