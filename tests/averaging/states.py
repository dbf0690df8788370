"""Donors and newcomers of a state on the memory network."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import torch

from swarmcli.events import Event, Events
from swarmcli.network import Endpoint, Identity, PeerID
from swarmcli.network.transports.base import Purpose
from swarmcli.state.assembly import DownloadedState
from swarmcli.state.donor import (
    ChunkHeader,
    ChunkRequest,
    InLine,
    ManifestHeader,
    StateDonor,
    StateRequest,
    state_method,
)
from swarmcli.state.download import download_state
from swarmcli.state.snapshot import PinnedState, Snapshot
from swarmcli.testing import MemoryNetwork
from swarmcli.testing.memory_connection import MemoryConnection

CHUNK = 4096  # bytes, where a test asks for small chunks


def make_state(seed: int = 0, size: int = 30_000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(size // 100, 100, generator=generator),
        "step": torch.tensor(7, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(999, generator=generator).to(torch.bfloat16),
        "mask": torch.tensor([True, False, True]),
    }


class Swarm:
    """Some donors and some newcomers."""

    def __init__(
        self,
        donors: int,
        newcomers: int = 1,
        *,
        bandwidth: float | None = None,
        hosts: Sequence[str] = (),
        **options: Any,
    ) -> None:
        """`hosts` of the newcomers; otherwise each peer is a network of its own."""
        self.network = MemoryNetwork(bandwidth=bandwidth)
        self._hosts = ["" for _ in range(donors)] + list(hosts or [""] * newcomers)
        self.endpoints = [self._endpoint(index) for index in range(donors + newcomers)]
        self.states = [Snapshot(b"v1", {"epoch": 3}, make_state()) for _ in range(donors)]
        self.provided = [0] * donors
        self.donors = [
            StateDonor(endpoint, "test", self._provide(index), **options)
            for index, endpoint in enumerate(self.endpoints[:donors])
        ]
        self.events: list[Event] = []

    def _endpoint(self, index: int) -> Endpoint:
        events = Events()
        events.subscribe(lambda event: self.events.append(event))
        transport = self.network.transport(Identity.from_seed(index), host=self._hosts[index])
        return Endpoint(transport, events=events, seed=index)

    def _provide(self, index: int) -> Callable[[bytes], Awaitable[Snapshot | None]]:
        async def provide(version: bytes) -> Snapshot | None:
            self.provided[index] += 1
            await asyncio.sleep(0.1)
            state = self.states[index]
            return state if version in (b"", state.version) else None

        return provide

    async def __aenter__(self) -> Swarm:
        for endpoint in self.endpoints:
            await endpoint.start()
        for donor in self.donors:
            donor.start()
        for endpoint in self.endpoints:
            for other in self.endpoints:
                endpoint.learn(other.peer_id, other.addresses)
        return self

    async def __aexit__(self, *exception: object) -> None:
        for donor in self.donors:
            donor.close()
        for endpoint in self.endpoints:
            await endpoint.close()

    @property
    def ids(self) -> list[PeerID]:
        return [endpoint.peer_id for endpoint in self.endpoints[: len(self.donors)]]

    async def download(self, newcomer: int = 0, **options: Any) -> DownloadedState:
        options.setdefault("timeout", 60)
        endpoint = self.endpoints[len(self.donors) + newcomer]
        return await download_state(endpoint, "test", options.pop("donors", self.ids), **options)


async def trickle(endpoint: Endpoint, donor: PeerID, version: bytes, prefix: str = "test", pause: float = 50.0) -> None:
    """Keeps a download open: asks for one chunk after the other, with pauses. Raises the error with which it ends."""
    answers: Any = ManifestHeader | InLine
    async with endpoint.stream(donor, state_method(prefix), StateRequest(version), timeout=30) as stream:
        while not isinstance((await stream.receive(answers))[0], ManifestHeader):
            pass
        while True:
            await stream.send(ChunkRequest(0, 1))
            await stream.receive(ChunkHeader)
            await asyncio.sleep(pause)


def check(got: DownloadedState, expected: Snapshot) -> None:
    assert got.metadata == expected.metadata and got.version == expected.version
    assert list(got.tensors) == list(expected.tensors)
    for name, tensor in expected.tensors.items():
        assert got.tensors[name].dtype == tensor.dtype and torch.equal(got.tensors[name], tensor)


def size_of(state: Snapshot) -> int:
    return PinnedState(state).layout.nbytes


def drip(monkeypatch: pytest.MonkeyPatch, peers: Sequence[PeerID], quick: int) -> None:
    """After its first `quick` bytes each stream of these peers sends a byte every 15 s: it is never silent long."""
    transmit, sent = MemoryConnection.transmit, Counter[MemoryConnection]()
    free: dict[MemoryConnection, float] = {}

    def slowly(self: MemoryConnection, data: bytes | memoryview, largest: int) -> None:
        if self.own_id not in peers or self.purpose is not Purpose.BULK:
            return transmit(self, data, largest)
        loop, now = asyncio.get_running_loop(), max(0, quick - sent[self])
        sent[self] += len(data)
        if data[:now]:
            transmit(self, data[:now], largest)
        for place in range(now, len(data)):
            free[self] = max(free.get(self, 0.0), loop.time()) + 15.0
            loop.call_at(
                free[self], lambda byte=bytes(data[place : place + 1]): self.ended or transmit(self, byte, largest)
            )

    monkeypatch.setattr(MemoryConnection, "transmit", slowly)
