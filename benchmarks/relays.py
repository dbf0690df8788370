"""What a relay costs and gives: a thousand clients on one, and one circuit beside a direct connection.

The relay is a process of its own, all its clients are in another one, on loopback. Its memory and the processor time
that it uses are read when nothing but keepalives passes: with reservations alone, and with a circuit for every two.
Then 256 MiB go from one client to another, each in a process of its own, through the relay and directly, in turns.

    python -m benchmarks relays
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection as Pipe
from typing import Any

import msgspec
import psutil

from swarmcli.network.addresses import Address
from swarmcli.network.endpoint import Endpoint, Stream
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.transports.tcp.transport import TCPTransport
from swarmcli.reach.circuits import open_circuits
from swarmcli.reach.relay_messages import RESERVE, Reserve, Reserved
from swarmcli.reach.relaying import Relay, RelayBudgets

MIB = 1 << 20
CLIENTS = 1000
STEPS = 50  # clients that come at the same time
QUIET = 20.0  # seconds over which processor time is counted
TOTAL = 256 * MIB
MESSAGE = MIB // 2
CALLS = 1000
REPEATS = 5
# All clients are on one machine here, so no network has a bound of its own; neither have bytes.
BUDGETS = RelayBudgets(
    reservations=2 * CLIENTS,
    reservations_per_network=2 * CLIENTS,
    circuits_per_network=CLIENTS,
    circuits_per_network_and_target=CLIENTS,
    connects_per_second=1000.0,
    connects_at_once=2.0 * CLIENTS,
    connects_per_second_to_target=1000.0,
    connects_at_once_to_target=2.0 * CLIENTS,
    rate=None,
    rate_per_peer=None,
)


class Number(msgspec.Struct, frozen=True):
    n: int


class Figures(msgspec.Struct, frozen=True):
    """Figures of the relay's process at one moment."""

    memory: float  # MiB
    processor: float  # seconds so far
    clock: float
    reservations: int
    circuits: int


# ---- processes that do what they are told


def obey(pipe: Pipe, main: Callable[[], Awaitable[dict[str, Callable[..., Awaitable[Any]]]]]) -> None:
    """Runs a loop on which the named functions are called, until "end" has been."""

    async def work() -> None:
        functions = await main()
        loop = asyncio.get_running_loop()
        while True:
            name, arguments = await loop.run_in_executor(None, pipe.recv)
            pipe.send(await functions[name](*arguments))
            if name == "end":
                return

    asyncio.run(work())


class Process:
    """The near end of `obey`."""

    def __init__(self, target: Callable[[Pipe], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=target, args=(there,))
        self._process.start()

    def begin(self, name: str, *arguments: Any) -> None:
        self._pipe.send((name, arguments))

    def result(self) -> Any:
        return self._pipe.recv()

    def do(self, name: str, *arguments: Any) -> Any:
        self.begin(name, *arguments)
        return self.result()

    def end(self) -> None:
        self.do("end")
        self._process.join()


def relay_process(pipe: Pipe) -> None:
    async def main() -> dict[str, Callable[..., Awaitable[Any]]]:
        endpoint = Endpoint(TCPTransport(Identity.generate(), host="127.0.0.1"))
        relay = Relay(endpoint, BUDGETS)
        await endpoint.start()
        await relay.start()
        process = psutil.Process()

        async def place() -> tuple[bytes, tuple[str, ...]]:
            return bytes(endpoint.peer_id), endpoint.addresses

        async def figures() -> Figures:
            times, now = process.cpu_times(), relay.statistics()
            memory = process.memory_info().rss / MIB
            return Figures(memory, times.user + times.system, time.monotonic(), now.reservations, now.circuits)

        async def end() -> None:
            await endpoint.close()

        return {"place": place, "figures": figures, "end": end}

    obey(pipe, main)


async def start_client(relay: PeerID, addresses: tuple[str, ...]) -> Endpoint:
    """A peer that nobody dials, with a reservation."""
    endpoint = Endpoint(TCPTransport(Identity.generate(), host="127.0.0.1"), client_mode=True)
    endpoint.serve_stream("sink", Number, _sink)
    endpoint.serve("echo", Number, _echo)
    await endpoint.start()
    transport = await open_circuits(endpoint)
    transport.relays.add(relay)
    endpoint.learn(relay, addresses)
    await endpoint.call(relay, RESERVE, Reserve(), Reserved, timeout=60)
    return endpoint


async def _sink(peer: PeerID, request: Number, stream: Stream) -> None:
    memory, received = memoryview(bytearray(MESSAGE)), 0
    while received < request.n:
        _, payload = await stream.receive(Number, lambda message, size: memory[:size])
        received += payload.nbytes
    await stream.send(Number(received))


async def _echo(peer: PeerID, request: Number) -> Number:
    return request


def crowd_process(pipe: Pipe) -> None:
    async def main() -> dict[str, Callable[..., Awaitable[Any]]]:
        clients: list[Endpoint] = []

        async def reserve(relay: bytes, addresses: tuple[str, ...]) -> None:
            while len(clients) < CLIENTS:
                made = (start_client(PeerID(relay), addresses) for _ in range(STEPS))
                clients.extend(await asyncio.gather(*made))

        async def pair_up(relay: bytes) -> None:
            for first in range(0, CLIENTS, STEPS):
                pairs = zip(clients[first : first + STEPS : 2], clients[first + 1 : first + STEPS : 2], strict=True)
                await asyncio.gather(*(_meet(a, b, PeerID(relay)) for a, b in pairs))

        async def end() -> None:
            for client in clients:
                await client.close()

        return {"reserve": reserve, "pair_up": pair_up, "end": end}

    obey(pipe, main)


async def _meet(a: Endpoint, b: Endpoint, relay: PeerID) -> None:
    a.learn(b.peer_id, [str(Address("relay", "", 0, b.peer_id, relay))])
    await a.call(b.peer_id, "echo", Number(1), Number, timeout=60)


def client_process(pipe: Pipe) -> None:
    """A client of the relay, or with no relay a peer that listens."""

    async def main() -> dict[str, Callable[..., Awaitable[Any]]]:
        own: list[Endpoint] = []

        async def start(relay: bytes | None, addresses: tuple[str, ...]) -> tuple[bytes, tuple[str, ...]]:
            if relay is not None:
                own.append(await start_client(PeerID(relay), addresses))
                through = str(Address("relay", "", 0, own[0].peer_id, PeerID(relay)))
                return bytes(own[0].peer_id), (through,)
            own.append(Endpoint(TCPTransport(Identity.generate(), host="127.0.0.1")))
            own[0].serve_stream("sink", Number, _sink)
            own[0].serve("echo", Number, _echo)
            await own[0].start()
            return bytes(own[0].peer_id), own[0].addresses

        async def measure(peer: bytes, addresses: tuple[str, ...]) -> tuple[float, float]:
            """Bytes per second of a stream, and the median seconds of a call."""
            there, memory, times = PeerID(peer), memoryview(bytearray(MESSAGE)), []
            own[0].learn(there, addresses)
            for _ in range(CALLS):
                began = time.perf_counter()
                await own[0].call(there, "echo", Number(1), Number, timeout=10)
                times.append(time.perf_counter() - began)
            async with own[0].stream(there, "sink", Number(TOTAL), timeout=10) as stream:
                began = time.perf_counter()
                for _ in range(TOTAL // MESSAGE):
                    await stream.send(Number(0), memory)
                await stream.receive(Number)
                return TOTAL / (time.perf_counter() - began), statistics.median(times)

        async def end() -> None:
            await own[0].close()

        return {"start": start, "measure": measure, "end": end}

    obey(pipe, main)


# ---- the run


def crowd() -> None:
    relay, clients = Process(relay_process), Process(crowd_process)
    place = relay.do("place")
    alone = relay.do("figures")
    began = time.monotonic()
    clients.do("reserve", *place)
    show(relay, alone, f"{CLIENTS} clients with reservations, there within {time.monotonic() - began:.0f} s")
    began = time.monotonic()
    clients.do("pair_up", place[0])
    show(relay, alone, f"a circuit for every two of them, there within {time.monotonic() - began:.0f} s")
    clients.end()
    relay.end()


def show(relay: Process, alone: Figures, what: str) -> None:
    time.sleep(2)  # what has just happened is over
    before: Figures = relay.do("figures")
    time.sleep(QUIET)
    after: Figures = relay.do("figures")
    share = (after.processor - before.processor) / (after.clock - before.clock)
    print(
        f"  {what}: {after.reservations} reservations, {after.circuits} circuits; "
        f"{after.memory - alone.memory:.0f} MiB above {alone.memory:.0f}, {100 * share:.1f} % of a core"
    )


def one_turn(through_relay: bool) -> tuple[float, float, float]:
    """Bytes per second, seconds of a call, and seconds of the relay's processor per GiB."""
    relay, a, b = Process(relay_process), Process(client_process), Process(client_process)
    place = relay.do("place")
    nobody = (None, ())
    a.do("start", *(place if through_relay else nobody))
    there = b.do("start", *(place if through_relay else nobody))
    before = relay.do("figures")
    rate, call = a.do("measure", *there)
    used = relay.do("figures").processor - before.processor
    for process in (a, b, relay):
        process.end()
    return rate, call, used * (1024 * MIB / TOTAL)


def main() -> None:
    crowd()
    turns = [(one_turn(False), one_turn(True)) for _ in range(REPEATS)]
    for name, index in (("direct", 0), ("through a relay", 1)):
        rate = statistics.median(turn[index][0] for turn in turns) / MIB
        call = statistics.median(turn[index][1] for turn in turns) * 1e6
        print(f"  {name:16} {rate:6.0f} MiB/s, a small call {call:5.0f} µs")
    ratio = statistics.median(through[0] / direct[0] for direct, through in turns)
    used = statistics.median(through[2] for _, through in turns)
    print(f"  ratio of the rates {ratio:.2f}; the relay computes {used:.1f} s for a GiB")


if __name__ == "__main__":
    main()
