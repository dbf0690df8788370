"""Averagers on the memory network under virtual time, each with an endpoint and a DHT node of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from swarmcli.averaging import RoundResult
from swarmcli.averaging.config import AllreduceOptions, AveragerConfig, MatchmakingOptions
from swarmcli.averaging.core import AveragerCore, GetState
from swarmcli.averaging.find.seek import Search
from swarmcli.averaging.group import Group
from swarmcli.averaging.round.program import RoundProgram
from swarmcli.averaging.step_control import RoundRequest, StepControl
from swarmcli.clock import Clock
from swarmcli.dht.node import DHTNode
from swarmcli.errors import SwarmError
from swarmcli.events import Event, PeerRefused, RoundFinished
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import Identity, PeerID
from swarmcli.testing.memory_network import MemoryNetwork
from swarmcli.testing.virtual_time import EPOCH
from tests.relaying import Relaying

FAST = AllreduceOptions(sender_timeout=5.0)


@dataclass(eq=False)
class Peer:
    node: DHTNode
    core: AveragerCore
    relaying: Relaying
    events: list[Event] = field(default_factory=list)

    @property
    def peer_id(self) -> PeerID:
        return self.node.peer_id

    @property
    def endpoint(self) -> Endpoint:
        return self.node.endpoint

    @property
    def values(self) -> list[float]:
        """The first element of each tensor."""
        return [float(tensor.flatten()[0]) for tensor in self.core._tensors]

    @property
    def rounds(self) -> list[RoundFinished]:
        return [event for event in self.events if isinstance(event, RoundFinished)]

    @property
    def refusals(self) -> list[PeerRefused]:
        return [event for event in self.events if isinstance(event, PeerRefused) and event.what == "group"]

    @property
    def search(self) -> Search:
        """The search for a group that is under way."""
        search = self.core.finder.search
        assert search is not None
        return search

    def begin(self, **request: Any) -> StepControl:
        return self.core.begin_round(RoundRequest(**request))


class Averagers:
    """`async with Averagers(seed) as swarm: peers = await swarm.add(4)`. All stop at the end of the block."""

    def __init__(self, seed: int, *, latency: float = 0.01) -> None:
        self.seed = seed
        self.network = MemoryNetwork(seed=seed, latency=latency)
        self.peers: list[Peer] = []
        self.dead: set[PeerID] = set()

    async def __aenter__(self) -> Averagers:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(peer.core.shutdown() for peer in self.peers))
        await asyncio.gather(*(peer.relaying.close() for peer in self.peers))
        await asyncio.gather(*(peer.node.shutdown() for peer in self.peers))

    async def add(self, count: int, **options: Any) -> list[Peer]:
        """Peers one after the other; peer number i begins with tensors full of i and of 10 i."""
        return [await self.add_one(**options) for _ in range(count)]

    async def add_one(
        self,
        *,
        listening: bool = True,
        relays: bool = False,
        clock_error: float = 0.0,
        shapes: Sequence[tuple[int, ...]] = ((3, 5), (40,)),
        matchmaking: dict[str, Any] | None = None,
        get_state: GetState | None = None,
        tensors: Sequence[torch.Tensor] | None = None,
        program: RoundProgram | None = None,
        **config: Any,
    ) -> Peer:
        number = len(self.peers)
        identity = Identity.from_seed(f"{self.seed}/{number}".encode())
        loop = asyncio.get_running_loop()
        clock = Clock(wall=lambda: EPOCH + loop.time() + clock_error, monotonic=loop.time)
        transport = self.network.transport(identity, listening=listening)
        endpoint = Endpoint(transport, clock=clock, client_mode=not listening, seed=self.seed * 1000 + number)
        events: list[Event] = []
        endpoint.events.subscribe(events.append)
        await endpoint.start()
        contacts = [peer.endpoint.addresses[0] for peer in self.peers if not peer.endpoint.client_mode][:1]
        node = await DHTNode.create(endpoint, initial_peers=contacts)
        if tensors is None:
            tensors = [torch.full(shape, float(number * 10**index)) for index, shape in enumerate(shapes)]
        settings = {"prefix": "test", "allreduce": FAST, "matchmaking": MatchmakingOptions(**(matchmaking or {}))}
        core = AveragerCore(
            tensors, node, AveragerConfig(**{**settings, **config}), get_state=get_state, program=program
        )
        relaying = Relaying(node, takes_part=relays)
        await relaying.start()
        await core.start()
        peer = Peer(node, core, relaying, events)
        self.peers.append(peer)
        return peer

    def kill(self, peer: Peer) -> None:
        """Like SIGKILL; what is left of it here does no harm to the others."""
        self.dead.add(peer.peer_id)
        self.network.kill(peer.peer_id)

    @property
    def living(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.peer_id not in self.dead]


async def all_results(controls: Sequence[StepControl]) -> list[RoundResult]:
    """What every round gave; the first error of any is raised."""
    return list(await asyncio.gather(*controls))


async def all_begun(controls: Sequence[StepControl]) -> Group:
    """The group in which the round of all of them has begun."""
    await asyncio.gather(*(asyncio.wrap_future(control.begun) for control in controls))
    group = controls[0].group
    assert group is not None
    return group


async def all_outcomes(controls: Sequence[StepControl]) -> list[RoundResult | SwarmError]:
    outcomes = await asyncio.gather(*controls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, SwarmError):
            raise outcome
    return outcomes  # type: ignore[return-value]


def assert_one_group(results: Sequence[RoundResult], peers: Sequence[Peer]) -> None:
    """All of these peers, and only they, were in one group."""
    assert {result.group.group_id for result in results} == {results[0].group.group_id}
    assert {member.peer_id for member in results[0].group.members} == {peer.peer_id for peer in peers}


def assert_all_equal(peers: Sequence[Peer], expected: float) -> None:
    """Everyone holds the same bits, which are `expected` in the first tensor and ten times that in the second."""
    for peer in peers:
        for own, other in zip(peer.core._tensors, peers[0].core._tensors, strict=True):
            assert torch.equal(own, other)
        torch.testing.assert_close(peer.core._tensors[0], torch.full_like(peer.core._tensors[0], expected))
        torch.testing.assert_close(peer.core._tensors[1], torch.full_like(peer.core._tensors[1], 10 * expected))
