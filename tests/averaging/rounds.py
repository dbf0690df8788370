"""A group of peers on the memory transport that run one round, and what must hold of its end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from swarmcli.averaging import RoundResult
from swarmcli.averaging.certificate import Quorum
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.group import Group, Member
from swarmcli.averaging.round.allreduce import Allreduce
from swarmcli.averaging.round.service import AllreduceService
from swarmcli.averaging.shares import reducing_shares
from swarmcli.errors import RoundFailed, RoundUndecided
from swarmcli.events import Event
from swarmcli.network import Endpoint, Identity, PeerID
from swarmcli.network.transports.base import Transport
from swarmcli.testing import MemoryNetwork

Outcome = RoundResult | RoundFailed | RoundUndecided


@dataclass
class Kind:
    """What a peer of the group is."""

    weight: float = 1.0
    listening: bool = True
    auxiliary: bool = False
    bandwidth: float = 1.0
    delay: float = 0.0  # seconds until its own trigger


@dataclass
class Peer:
    kind: Kind
    endpoint: Endpoint
    service: AllreduceService
    tensors: list[torch.Tensor]
    before: list[torch.Tensor] = field(default_factory=list)

    @property
    def peer_id(self) -> PeerID:
        return self.endpoint.peer_id


class Swarm:
    """`async with Swarm(kinds) as swarm: outcomes = await swarm.round()`."""

    def __init__(
        self,
        kinds: Sequence[Kind],
        *,
        seed: int = 0,
        shapes: Sequence[tuple[int, ...]] = ((40, 30), (7,), (300,)),
        dtype: torch.dtype = torch.float32,
        latency: float = 0.01,
        bandwidth: float | None = None,
        options: AllreduceOptions | None = None,
    ) -> None:
        self.network = MemoryNetwork(seed=seed, latency=latency, bandwidth=bandwidth)
        self.options = options or AllreduceOptions(part_size_bytes=1024)
        self.quickly = math.inf  # seconds for a round once all have begun, where an averager knows the lines
        generator = torch.Generator().manual_seed(seed)
        self.peers: list[Peer] = []
        self.events: list[Event] = []  # of all peers
        for index, kind in enumerate(kinds):
            identity = Identity.from_seed(seed * 1000 + index)
            transport = self.transport(identity, listening=kind.listening)
            endpoint = Endpoint(transport, client_mode=not kind.listening, seed=index)
            endpoint.events.subscribe(self.events.append)
            tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
            self.peers.append(
                Peer(kind, endpoint, AllreduceService(endpoint, "test", trust=self.options.trust), tensors)
            )
        self._nonce = 0

    def transport(self, identity: Identity, *, listening: bool) -> Transport:
        return self.network.transport(identity, listening=listening)

    async def __aenter__(self) -> Swarm:
        for peer in self.peers:
            await peer.endpoint.start()
            peer.service.start()
        leader = self.peers[0]
        for peer in self.peers[1:]:  # as after matchmaking: everyone is connected to the leader
            await peer.endpoint.connect(leader.endpoint.addresses[0], timeout=10)
        return self

    async def __aexit__(self, *exception: object) -> None:
        for peer in self.peers:
            await peer.service.shutdown()
            await peer.endpoint.close()

    def group(self) -> Group:
        members = [
            Member(
                peer.peer_id,
                peer.kind.listening,
                peer.kind.auxiliary,
                peer.kind.bandwidth,
                peer.endpoint.addresses,
            )
            for peer in self.peers
        ]
        self._nonce += 1
        shares = reducing_shares(members, sum(tensor.numel() for tensor in self.peers[0].tensors))
        self.formed = Group.form(b"lineage", members, shares, self._nonce.to_bytes(16, "big"))
        return self.formed

    def quorum(self) -> Quorum:
        return Quorum.of(self.group(), self.options.trust)

    async def take_part(self, peer: Peer, group: Group) -> Outcome:
        with peer.service.expecting(group):
            await asyncio.sleep(peer.kind.delay)
            peer.before = [tensor.clone() for tensor in peer.tensors]
            weight, seconds = peer.kind.weight, self.quickly
            round_ = Allreduce(peer.service, group, peer.tensors, weight=weight, options=self.options, quickly=seconds)
            try:
                return await round_.run()
            except (RoundFailed, RoundUndecided) as error:
                return error

    async def round(
        self,
        meanwhile: Callable[[], Awaitable[None]] | None = None,
        scripts: Mapping[int, Callable[[Peer, Group], Awaitable[None]]] | None = None,
    ) -> list[Outcome | None]:
        """Everyone's outcome; None for those whose process was killed. `meanwhile` runs beside the round.

        Members with a script follow that instead of the protocol; their outcome is None.
        """
        group = self.group()
        work = dict.fromkeys(range(len(self.peers)), self.take_part) | dict(scripts or {})
        tasks = [asyncio.create_task(work[index](peer, group)) for index, peer in enumerate(self.peers)]
        self.tasks = tasks
        if meanwhile is not None:
            await meanwhile()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(
                outcome, RoundFailed | RoundUndecided | asyncio.CancelledError
            ):
                raise outcome
        return [None if isinstance(outcome, asyncio.CancelledError) else outcome for outcome in outcomes]  # type: ignore[misc]

    def kill(self, index: int) -> None:
        """As SIGKILL would: its connections are reset and its tasks do nothing more."""
        self.network.kill(self.peers[index].peer_id)
        self.tasks[index].cancel()

    def close(self, index: int) -> None:
        """It takes no further part and serves no round any more; its connections stay."""
        self.tasks[index].cancel()
        self.peers[index].service.close()

    def freeze(self, index: int) -> None:
        self.network.freeze(self.peers[index].peer_id)

    def expected_mean(self, result: RoundResult) -> torch.Tensor:
        """The mean in float64, part by part, of the inputs of the senders that the result names."""
        flat = {
            index: torch.cat([t.double().flatten() for t in peer.before])
            for index, peer in enumerate(self.peers)
            if peer.before
        }
        pieces, position = [], 0
        for average in result.parts:
            size = average.part.descriptor.numel
            window = slice(position, position + size)
            pairs = zip(average.senders, average.weights, strict=True)
            pieces.append(sum(flat[sender][window] * weight for sender, weight in pairs) / sum(average.weights))
            position += size
        return torch.cat(pieces)

    def check_mean(self, result: RoundResult, tolerance: float = 1e-6) -> None:
        got = torch.cat([tensor.double().flatten() for tensor in result.averages])
        assert torch.allclose(got, self.expected_mean(result), rtol=tolerance, atol=tolerance)

    def check(self, outcomes: Sequence[Outcome | None], *, tolerance: float = 1e-6) -> list[RoundResult]:
        """One outcome: equal bits for all who committed, the mean of the named senders, everyone's inputs as before.

        Returns the results of those who committed and hold averages.
        """
        committed = [outcome for outcome in outcomes if isinstance(outcome, RoundResult)]
        if committed:
            assert not any(isinstance(outcome, RoundFailed) for outcome in outcomes), outcomes
            assert len({result.digest for result in committed}) == 1
        for peer in self.peers:
            for tensor, before in zip(peer.tensors, peer.before, strict=False):
                assert torch.equal(tensor.nan_to_num(), before.nan_to_num())
        holders = [result for result in committed if result.averages]
        for result in holders:
            assert result.contributors == holders[0].contributors
            assert result.weights == holders[0].weights
            for mine, other in zip(result.averages, holders[0].averages, strict=True):
                assert torch.equal(mine, other)
        for result in holders[:1]:
            self.check_mean(result, tolerance)
        return holders
