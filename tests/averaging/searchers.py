"""Peers that only look for groups, again and again, on the memory network under virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from swarmcli.averaging.config import AveragerConfig, MatchmakingOptions
from swarmcli.averaging.find.finder import GroupFinder
from swarmcli.averaging.find.messages import Candidate, Join, Offer
from swarmcli.averaging.group import Group
from swarmcli.averaging.round.plan import Layout
from swarmcli.averaging.step_control import RoundRequest, StepControl
from swarmcli.averaging.trust import PeerTrust
from swarmcli.clock import Clock
from swarmcli.dht.node import DHTNode
from swarmcli.errors import SwarmError
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import Identity, PeerID
from swarmcli.testing.memory_network import Latency, MemoryNetwork
from swarmcli.testing.virtual_time import EPOCH


def peer_id(number: int) -> PeerID:
    return PeerID(number.to_bytes(32, "big"))


def join_of(candidate: Candidate, patience: float = 1.0, progress: float = 0.0, gathered: bytes = b"") -> Join:
    """What this candidate says when it asks to join."""
    return Join(candidate, Offer(gathered=gathered), {}, 0.0, patience, progress)


@dataclass(eq=False)
class Searcher:
    """One peer. `jump` holds the error of its clock in seconds; a test may change it at any time."""

    node: DHTNode
    finder: GroupFinder
    trust: PeerTrust
    jump: list[float]
    groups: list[Group] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)  # seconds from the beginning of a search to its group
    failures: list[str] = field(default_factory=list)

    @property
    def peer_id(self) -> PeerID:
        return self.node.peer_id

    async def find(self, **request: Any) -> Group | None:
        """One search. None, and the failure is noted, if no group came together."""
        loop = asyncio.get_running_loop()
        wanted = RoundRequest(**request)
        deadline = None if wanted.timeout is None else loop.time() + wanted.timeout
        control, began = StepControl(wanted, self.node.endpoint.clock), loop.time()
        try:
            group = await self.finder.find(control, b"", deadline)
        except SwarmError as error:
            self.failures.append(f"{type(error).__name__} at {loop.time():.2f}: {error}")
            return None
        self.trust.note_group(frozenset(member.peer_id for member in group.members))  # as if its round committed
        self.groups.append(group)
        self.waits.append(loop.time() - began)
        return group

    async def keep_searching(self, work: Callable[[], float], **request: Any) -> None:
        """Search after search; a round, and what is computed in between, takes `work()` seconds."""
        while True:
            await self.find(**request)
            await asyncio.sleep(work())


class Searchers:
    """`async with Searchers(seed) as swarm: peers = [await swarm.add() for _ in range(4)]`."""

    def __init__(self, seed: int, *, latency: Latency = 0.01, **matchmaking: Any) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.network = MemoryNetwork(seed=seed, latency=latency)
        self.options = MatchmakingOptions(**matchmaking)
        self.peers: list[Searcher] = []
        self.gone: list[Searcher] = []
        self._made = 0

    async def __aenter__(self) -> Searchers:
        return self

    async def __aexit__(self, *_: object) -> None:
        for peer in (*self.peers, *self.gone):
            await peer.finder.stop()
            await peer.node.shutdown()

    async def add(self, *, listening: bool = True, host: str = "", **config: Any) -> Searcher:
        self._made += 1
        identity = Identity.from_seed(f"{self.seed}/{self._made}".encode())
        loop, jump = asyncio.get_running_loop(), [0.0]
        # As on a machine that was suspended: the clock that nobody can set has moved on.
        clock = Clock(wall=lambda: EPOCH + loop.time(), monotonic=lambda: loop.time() + jump[0])
        transport = self.network.transport(identity, listening=listening, host=host, port=4000 if host else 0)
        seed = self.seed * 10_000 + self._made
        endpoint = Endpoint(transport, clock=clock, client_mode=not listening, seed=seed)
        await endpoint.start()
        contacts = [address for peer in self.peers for address in peer.node.endpoint.addresses][:3]
        node = await DHTNode.create(endpoint, initial_peers=contacts)
        settings = AveragerConfig(prefix="test", matchmaking=self.options, **config)
        trust = PeerTrust.of(endpoint, "test")
        finder = GroupFinder(
            node,
            settings,
            Layout.of([torch.zeros(100)]),
            {},
            trust,
        )
        finder.start()
        peer = Searcher(node, finder, trust, jump)
        self.peers.append(peer)
        return peer

    async def remove(self, peer: Searcher, *, kill: bool) -> None:
        """The peer dies, or says goodbye first. The caller cancels its search's task, before this call or after."""
        self.peers.remove(peer)
        self.gone.append(peer)
        if kill:
            self.network.kill(peer.peer_id)
        else:
            await peer.finder.stop()
            await peer.node.shutdown()
