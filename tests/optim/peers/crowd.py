"""As many peers of a run as one likes, as far as their reports go: their directories and trackers, which pace what they
read and write, and the hash table's followers, storage and service. No network lies between, and nobody signs."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from swarmcli.dht.limits import DHTLimits
from swarmcli.dht.messages import FindReply, FindRequest
from swarmcli.dht.reading import Follower
from swarmcli.dht.records import OwnedSubkey, Record, encode_subkey, encode_value, key_id
from swarmcli.dht.routing import Contact
from swarmcli.dht.service import DHTService
from swarmcli.dht.storage import RecordWriter, Storage
from swarmcli.events import Events
from swarmcli.network.identity import PeerID
from swarmcli.network.prefix import Prefix
from swarmcli.optim.peers.directory import PeerDirectory
from swarmcli.optim.peers.progress import ProgressTrackerCore
from swarmcli.optim.peers.report import MAX_RECENT, PeerReport, ReportedLoss

EPOCH = 10.0  # seconds
REPLICAS = 5
LATENCY = 0.05  # seconds one way
ENVELOPE = 20  # bytes of an answer around its body


def now() -> float:
    return asyncio.get_running_loop().time()


def swarm_time() -> float:
    return 1_700_000_000.0 + now()


class Replica:
    """A node of the hash table that stores, and counts what it sends."""

    def __init__(self, number: int) -> None:
        self.contact = Contact(PeerID(random.Random(number).randbytes(32)), ("memory://replica",))
        self.limits, self.instance = DHTLimits(), number + 1
        self.storage = Storage(self.limits)
        self.contacts = SimpleNamespace(table=SimpleNamespace(nearest_apart=lambda target, count: []))
        self.service = DHTService(cast(Any, self))
        self.sent = 0

    def now(self) -> float:
        return swarm_time()

    def heard_from(self, peer: PeerID, listening: bool) -> None:
        pass

    def writer(self, peer: PeerID) -> RecordWriter:
        return RecordWriter(peer, Prefix("host", peer.text))


class Node:
    """A peer, as far as its boards use it: the node of the hash table, its core and its endpoint."""

    num_replicas, rests, client_mode = REPLICAS, False, False

    def __init__(self, number: int, replicas: list[Replica]) -> None:
        self.peer_id, self.replicas = PeerID(random.Random(f"peer {number}").randbytes(32)), replicas
        self.limits, self.received, self.numbered = DHTLimits(), 0, 0
        self.storage = Storage(self.limits)
        self.contacts = SimpleNamespace(table=SimpleNamespace(nearest_apart=self.nearest))
        self.checker = SimpleNamespace(watch=lambda key: Counter())
        self.endpoint = SimpleNamespace(
            peer_id=self.peer_id,
            clock=SimpleNamespace(now=swarm_time),
            events=Events(),
            membership=None,
            learn=lambda peer, addresses: None,
            is_connected=lambda peer: False,
        )

    def now(self) -> float:
        return swarm_time()

    def nearest(self, target: int, count: int) -> list[Contact]:
        return sorted((each.contact for each in self.replicas), key=lambda contact: contact.node ^ target)[:count]

    def own_subkey(self, identity: object = None) -> OwnedSubkey:
        return OwnedSubkey(self.peer_id, b"")

    def follow(self, key: str) -> Follower:
        return Follower(cast(Any, self), key)

    def add_validators(self, validators: object) -> None:
        pass

    def writer(self, peer: PeerID) -> RecordWriter:
        return RecordWriter(peer, Prefix("host", peer.text))

    async def explore(self, target: int, width: int) -> list[Contact]:
        return self.nearest(target, width)

    async def search(self, target: int, ask: Any, **options: Any) -> list[Contact]:
        nearest = self.nearest(target, REPLICAS)
        await asyncio.gather(*(ask(contact) for contact in nearest))
        return nearest

    def breadth(self, target: int) -> int:
        return 0

    async def find(
        self, contact: Contact, question: Any, *, contacts: int, values: bool, room: int = 0
    ) -> tuple[FindReply, list[Contact]]:
        await asyncio.sleep(LATENCY)
        replica = next(each for each in self.replicas if each.contact == contact)
        request = FindRequest(True, (question,), contacts, values, room)
        reply = await replica.service.find(self.peer_id, request)
        sent = len(msgspec.msgpack.encode(reply)) + ENVELOPE
        replica.sent += sent
        await asyncio.sleep(LATENCY)
        self.received += sent
        return reply, []

    async def checked(self, records: list[Record], target: int, source: PeerID) -> list[Record]:
        return records

    async def store(self, key: str, value: Any, expiration: float, subkey: OwnedSubkey) -> bool:
        self.numbered += 1
        signature = bytes(64)
        record = Record(key, encode_subkey(subkey), encode_value(value), expiration, self.numbered, signature)
        await asyncio.sleep(LATENCY)
        for contact in self.nearest(key_id(key), REPLICAS):
            replica = next(each for each in self.replicas if each.contact == contact)
            replica.storage.put(record, swarm_time(), replica.writer(self.peer_id))
        return True

    async def withdraw(self, key: str, subkey: OwnedSubkey) -> None:
        pass


class Peer:
    """A trainer that reports each step and each epoch, of which it does nothing."""

    def __init__(self, node: Node, peers: int, step: float) -> None:
        self.node, self.step, self.epoch = node, step, 0
        self.directory = PeerDirectory(cast(Any, node), "run", self.describe)
        self.tracker = ProgressTrackerCore(cast(Any, node), "run", max(1, round(EPOCH / step)) * peers)

    def describe(self) -> PeerReport:
        """As long as reports become after some epochs."""
        epoch = MAX_RECENT + self.epoch
        losses = [ReportedLoss(epoch=each, loss=1 / each, samples=100 * each) for each in range(self.epoch + 1, epoch)]
        return PeerReport(
            terms="t" * 32,
            role="trainer",
            name=self.node.peer_id.short,
            device="NVIDIA A100-SXM4-80GB",
            phase="training",
            epoch=epoch,
            lineage="ab" * 32,
            samples_seen=100_000 * epoch,
            samples=100 * epoch,
            samples_per_second=12.5,
            client_mode=False,
            addresses=["tcp://192.0.2.100:31330"],
            loss=1 / epoch,
            recent=losses,
            last_outcome="committed",
            last_reason="",
            time=swarm_time(),
        )

    async def run(self, begins: float) -> None:
        await asyncio.sleep(begins)
        await self.directory.start()
        await self.tracker.start()
        steps = 0
        while True:
            await asyncio.sleep(self.step)
            if (epoch := int(now() / EPOCH)) > self.epoch:
                self.epoch, steps = epoch, 0
                with self.tracker.pause_updates():
                    self.tracker.update_epoch(epoch)
                self.directory.announce()
            steps += 1
            self.tracker.report_local_progress(self.epoch, steps)

    async def shutdown(self) -> None:
        await self.directory.shutdown()
        await self.tracker.shutdown()


@dataclass(frozen=True)
class Minute:
    """Of all peers together; bytes per second."""

    reads: float  # of the peer that read the most
    sends: float  # of the replica that sent the most
    age: float  # seconds, of the reports that peers know, in the middle
    known: float  # part of the peers whose report a peer knows, on average


async def crowd(count: int, minutes: int, *, within: float, step: float) -> list[Minute]:
    """So many peers start within so many seconds, and train for so many minutes, a local step every `step` seconds."""
    drawn = random.Random(count)
    replicas = [Replica(number) for number in range(min(count, 20))]
    peers = [Peer(Node(number, replicas), count, step) for number in range(count)]
    tasks = [asyncio.create_task(peer.run(drawn.uniform(0.0, within))) for peer in peers]
    told: list[Minute] = []
    for _ in range(minutes):
        for each in (*replicas, *(peer.node for peer in peers)):
            setattr(each, "sent" if isinstance(each, Replica) else "received", 0)
        await asyncio.sleep(60.0)
        ages = sorted(swarm_time() - report.time for peer in peers for report in peer.directory.others.values())
        reads, sends = max(peer.node.received for peer in peers), max(replica.sent for replica in replicas)
        told.append(Minute(reads / 60, sends / 60, ages[len(ages) // 2], len(ages) / count / (count - 1)))
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for peer in peers:
        await peer.shutdown()
    return told
