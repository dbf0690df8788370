"""A peer in a home that nobody can dial, or the relay of such peers. It obeys lines, and answers each with one of JSON.

python -m tests.reach.punching_peer relay SEED
python -m tests.reach.punching_peer home SEED RELAY_ADDRESS [LISTENER_ADDRESS ...]

meet SEED N      reserves at the relay, calls the peer of this seed through it; how it goes on for N seconds
stay SEED N      reserves at the relay, and is called
call SEED        calls it once; how
stream SEED N    sends N MiB on a stream; how fast and which way
new SEED         becomes another peer
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from swarmcli.errors import NetworkError
from swarmcli.network import Endpoint, Identity, PeerID, Stream
from swarmcli.network.addresses import Address
from swarmcli.network.transports.tcp import TCPTransport
from swarmcli.reach.circuits import RelayTransport
from swarmcli.reach.evidence import look_around
from swarmcli.reach.punch import Puncher
from swarmcli.reach.relay_messages import RESERVE, Reserve, Reserved
from swarmcli.reach.relaying import Relay
from tests.network.worlds import Number, double

PATIENCE = 30.0
MIB = 1 << 20


def peer_of(seed: str) -> PeerID:
    return Identity.from_seed(seed.encode()).peer_id


async def sink(peer: PeerID, request: Number, stream: Stream) -> None:
    for _ in range(request.n):
        await stream.receive(Number)
    await stream.send(Number(request.n))


async def start(seed: str, *, home: bool) -> Endpoint:
    endpoint = Endpoint(TCPTransport(Identity.from_seed(seed.encode())))
    endpoint.serve("double", Number, double)
    endpoint.serve_stream("sink", Number, sink)
    await endpoint.start()
    if home:
        endpoint.announce(direct=())
    return endpoint


class Home:
    """One life of a peer in a home."""

    def __init__(self, listeners: list[str]) -> None:
        self._listeners = listeners

    async def new(self, seed: str) -> dict[str, Any]:
        await self.close()
        self.endpoint = await start(seed, home=True)
        self.transport = RelayTransport(self.endpoint)
        self.endpoint.add_transport("relay", self.transport)
        await self.transport.listen(self.endpoint.adopt)
        around = look_around(self.endpoint.listener_addresses)
        self.puncher = Puncher(self.endpoint, around=lambda: around)
        await self.puncher.start()
        relay, *_ = [await self.endpoint.connect(address, timeout=PATIENCE) for address in self._listeners]
        self.transport.relays.add(relay)
        await self.endpoint.call(relay, RESERVE, Reserve(), Reserved, timeout=PATIENCE)
        self.endpoint.announce(relayed=[self._through(relay, self.endpoint.peer_id)])
        self._relay = relay
        return {}

    async def close(self) -> None:
        if hasattr(self, "puncher"):
            await self.puncher.close()
            await self.endpoint.close()

    async def meet(self, seed: str, seconds: str) -> dict[str, Any]:
        peer = peer_of(seed)
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            self.endpoint.learn(peer, [self._through(self._relay, peer)])
            try:
                await self.endpoint.call(peer, "double", Number(1), Number, timeout=PATIENCE)
                break
            except NetworkError:
                if loop.time() > began + PATIENCE:
                    raise
                await asyncio.sleep(0.1)
        relayed = loop.time()
        for _ in range(100 * int(seconds)):
            if self._way(peer) != "relayed":
                break
            await asyncio.sleep(0.01)
        return {"way": self._way(peer), "seconds": loop.time() - relayed, **self._figures()}

    async def call(self, seed: str) -> dict[str, Any]:
        began = asyncio.get_running_loop().time()
        try:
            await self.endpoint.call(peer_of(seed), "double", Number(1), Number, timeout=PATIENCE)
            error = ""
        except NetworkError as problem:
            error = type(problem).__name__
        seconds = asyncio.get_running_loop().time() - began
        return {"way": self._way(peer_of(seed)), "error": error, "seconds": seconds}

    async def stream(self, seed: str, count: str) -> dict[str, Any]:
        loop, memory = asyncio.get_running_loop(), bytes(MIB)
        asked = loop.time()
        try:
            async with self.endpoint.stream(peer_of(seed), "sink", Number(int(count)), timeout=PATIENCE) as stream:
                began = loop.time()
                for _ in range(int(count)):
                    await stream.send(Number(1), memory)
                await stream.receive(Number)
                rate = int(count) * MIB / (loop.time() - began)
                return {"relayed": stream.relayed, "opening": began - asked, "rate": rate, "error": ""}
        except NetworkError as problem:
            return {"error": type(problem).__name__, "seconds": loop.time() - asked}

    async def figures(self) -> dict[str, Any]:
        return self._figures()

    def _figures(self) -> dict[str, Any]:
        kinds = {family: self.puncher.outside.translation(family) for family in ("IPv4", "IPv6")}  # type: ignore[arg-type]
        return {"attempts": self.puncher.attempts, "translation": kinds}

    def _way(self, peer: PeerID) -> str:
        seen = self.endpoint.seen(peer)
        if seen is None:
            return ""
        return "relayed" if seen.relayed else "punched" if seen.punched else "dialed"

    def _through(self, relay: PeerID, peer: PeerID) -> str:
        return str(Address("relay", "", 0, peer, relay))


async def obey(commands: Callable[[str], Callable[..., Awaitable[dict[str, Any]]]]) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, *words = line.split()
        print(json.dumps(await commands(name)(*words)), flush=True)


async def main(kind: str, seed: str, *listeners: str) -> None:
    if kind == "relay":
        endpoint = await start(seed, home=False)
        relay = Relay(endpoint)
        await relay.start()
        print(json.dumps(endpoint.listener_addresses), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await relay.close()
        await endpoint.close()
    else:
        home = Home(list(listeners))
        print(json.dumps(await home.new(seed)), flush=True)
        await obey(lambda name: getattr(home, name))  # type: ignore[no-any-return]
        await home.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
