"""Many nodes with the real searches, tables and services, on a network that only delays."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any

from swarmcli.clock import Clock
from swarmcli.dht import DHTLimits, messages
from swarmcli.dht.core import NodeCore
from swarmcli.dht.messages import FindAnswer, FindReply, FindRequest, Outcome, StoreReply, StoreRequest
from swarmcli.dht.reading import KeyRead, read
from swarmcli.dht.records import Record, encode_value, key_id
from swarmcli.dht.routing import Contact
from swarmcli.dht.service import DHTService
from swarmcli.dht.storage import StoreVerdict
from swarmcli.dht.writing import write
from swarmcli.errors import CallTimeout, UnknownMethod
from swarmcli.events import Events
from swarmcli.network.addresses import Scope
from swarmcli.network.identity import PeerID
from swarmcli.network.prefix import Prefix, prefix_of_address
from swarmcli.testing.virtual_time import EPOCH

Handler = Callable[[PeerID, Any], Awaitable[Any]]


class CrowdEndpoint:
    """What a node of the hash table needs of an endpoint."""

    client_mode = False

    def __init__(self, crowd: Crowd, peer_id: PeerID, address: str) -> None:
        loop = asyncio.get_running_loop()
        self.peer_id, self.direct_addresses = peer_id, (address,)
        self.random = random.Random(peer_id)
        self.clock = Clock(wall=lambda: EPOCH + loop.time())
        self.events = Events()
        self.calls = 0
        self._crowd = crowd
        self._handlers: dict[str, Handler] = {}

    def serve(self, method: str, request_type: type, handler: Handler) -> None:
        self._handlers[method] = handler

    def withdraw(self, *methods: str) -> None:
        for method in methods:
            self._handlers.pop(method, None)

    async def call(self, peer: PeerID, method: str, request: Any, response_type: type, *, timeout: float) -> Any:
        self.calls += 1
        there = self._crowd.endpoints.get(peer)
        if there is None:
            await asyncio.sleep(0.1)  # refused: nobody listens there, or it is somebody else
            raise CallTimeout("nobody is there")
        await asyncio.sleep(self.random.uniform(0.01, 0.2))
        if method not in there._handlers:
            raise UnknownMethod(method)
        return await there._handlers[method](self.peer_id, request)

    def prefix(self, peer: PeerID) -> Prefix | None:
        there = self._crowd.endpoints.get(peer)
        return None if there is None else prefix_of_address(there.direct_addresses[0])

    def own_word(self, peer: PeerID) -> tuple[str, ...]:
        return self._crowd.endpoints[peer].direct_addresses

    def learn(self, peer: PeerID, addresses: Iterable[str], *, horizon: Scope | None = None) -> None:
        pass

    def horizon(self, source: PeerID | None) -> Scope:
        return Scope.INTERNET

    def is_connected(self, peer: PeerID) -> bool:
        return peer in self._crowd.endpoints

    def connected(self) -> tuple[PeerID, ...]:
        return ()

    def round_trip(self, peer: PeerID) -> float | None:
        return None


class Crowd:
    """`count` nodes that have met at random; each has a network of its own unless `hosts` says where it is."""

    def __init__(self, count: int, seed: int, *, more: Sequence[PeerID] = (), host: Callable[[int], str] | None = None):
        self.random = random.Random(seed)
        self.endpoints: dict[PeerID, CrowdEndpoint] = {}
        self.cores: list[NodeCore] = []
        peers = [PeerID(self.random.randbytes(32)) for _ in range(count)]
        for number, peer in enumerate([*peers, *more]):
            where = f"{20 + number // 250}.{number % 250}.1.1" if host is None or number < count else host(number)
            self._add(peer, f"tcp://{where}:4000")
        self.meet()

    def _add(self, peer: PeerID, address: str) -> None:
        endpoint = self.endpoints[peer] = CrowdEndpoint(self, peer, address)
        core = NodeCore(endpoint, DHTLimits())  # type: ignore[arg-type]
        self.cores.append(core)
        DHTService(core).start()

    def meet(self) -> None:
        contacts = [Contact(core.peer_id, core.addresses) for core in self.cores]
        for core in self.cores:
            for contact in self.random.sample(contacts, len(contacts)):
                core.contacts.heard_from(contact, 0.0)

    def corrupt(self, liars: Collection[NodeCore], invented: int = 0) -> None:
        """From now on these, who know each other, say that they have stored, have nothing, and name, of all nodes, only
        the nearest liars, and before them so many contacts that they invent."""
        named = [Contact(core.peer_id, core.addresses) for core in liars]
        for core in liars:
            name_each_other(core, named, invented)

    async def store(self, core: NodeCore, key: str) -> None:
        await write(core, [Record(key, b"\xc0", encode_value("honest"), core.now() + 1000.0)])

    async def found(self, core: NodeCore, key: str) -> bool:
        reading = KeyRead(key_id(key))
        await read(core, reading, latest=True)
        return bool(reading.records)


def name_each_other(core: NodeCore, liars: Sequence[Contact], invented: int) -> None:
    async def store(peer: PeerID, request: StoreRequest) -> StoreReply:
        core.heard_from(peer, request.listening)
        return StoreReply((Outcome(int(StoreVerdict.STORED)),) * len(request.records))

    async def compare(peer: PeerID, request: messages.SyncRequest) -> messages.SyncReply:
        core.heard_from(peer, request.listening)
        return messages.SyncReply(())

    async def find(peer: PeerID, request: FindRequest) -> FindReply:
        core.heard_from(peer, request.listening)
        target = int.from_bytes(request.questions[0].target, "big")
        fake = [invented_near(core.endpoint.random, target) for _ in range(min(invented, request.contacts))]
        near = sorted(liars, key=lambda contact: contact.node ^ target)
        return FindReply(1, tuple([*fake, *near][: request.contacts]), (FindAnswer(),) * request.values)

    core.endpoint.serve(messages.STORE, StoreRequest, store)
    core.endpoint.serve(messages.SYNC, messages.SyncRequest, compare)
    core.endpoint.serve(messages.FIND, FindRequest, find)


def invented_near(source: random.Random, target: int) -> Contact:
    """An id that nobody has the key of costs a hash, so the liar takes the best of some."""
    drawn = [PeerID(source.randbytes(32)) for _ in range(64)]
    nearest = min(drawn, key=lambda peer: int.from_bytes(hashlib.sha256(peer).digest(), "big") ^ target)
    return Contact(nearest, (f"tcp://{source.randrange(20, 100)}.{source.randrange(256)}.1.1:9",))


async def share_found(crowd: Crowd, honest: Sequence[NodeCore], reads: int, *, per_key: int = 1) -> float:
    """The share of `reads` by honest nodes, of keys that honest nodes have written, that finds the record."""
    keys = [f"key {number}" for number in range(-(-reads // per_key))]
    found = 0
    for key in keys:
        await crowd.store(crowd.random.choice(honest), key)
        for _ in range(per_key):
            found += await crowd.found(crowd.random.choice(honest), key)
    return found / (len(keys) * per_key)


def calls(cores: Iterable[NodeCore]) -> int:
    endpoints: list[Any] = [core.endpoint for core in cores]
    return sum(endpoint.calls for endpoint in endpoints)
