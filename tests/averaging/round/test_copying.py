"""Copies of averages between members: only what its reducers have signed is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from swarmcli.averaging import RoundResult
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.round.buffers import Holdings
from swarmcli.averaging.round.messages import CopyHeader, CopyParts, CopyRequest, CopyTable
from swarmcli.compression.base import tensor_memory
from swarmcli.errors import CallRefused, EndOfStream
from swarmcli.events import PeerRefused
from swarmcli.network import Stream
from tests.averaging.rounds import Kind, Peer, Swarm
from tests.simulation import within

Copy = tuple[tuple[int, ...], tuple[float, ...], torch.Tensor]

FORGERIES: dict[str, tuple[Callable[[Copy], Copy], str]] = {
    "altered content": (lambda copy: (*copy[:2], copy[2] + 1), "does not have the content"),
    "not a number": (lambda copy: (*copy[:2], copy[2] * torch.nan), "does not have the content"),
    "other senders": (lambda copy: ((0,), (1.0,), copy[2]), "does not have the content"),
    "senders of no group": (lambda copy: ((0, 9), (1.0, 1.0), copy[2]), "no tensors in this group"),
    "other weights": (lambda copy: (copy[0], (-1.0,) * len(copy[1]), copy[2]), "impossible weights"),
    "too little": (lambda copy: (*copy[:2], copy[2][:1]), "bytes"),
    "another table": (lambda copy: copy, "has not signed"),
}


@pytest.mark.parametrize("name", FORGERIES)
@within(2000)
async def test_false_copies_are_refused_and_the_averages_come_from_elsewhere(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member is cut off from two reducers when it lacks little of the averages; the first that gives copies lies."""
    forge, words = FORGERIES[name]
    liars: list[Holdings] = []

    async def give(holdings: Holdings, request: CopyRequest, stream: Stream) -> None:
        lies = not liars or holdings in liars
        liars.extend([holdings] if lies else [])
        digests, inputs = holdings.tables
        if lies and name == "another table":
            digests = digests[32:] + digests[:32]
        await stream.send(CopyTable(holdings.signed.told), (digests, inputs))  # type: ignore[union-attr]
        wanted, _ = await stream.receive(CopyParts)
        for index in wanted.parts:
            average, content = holdings.get(index), holdings.content(index)
            assert average is not None and content is not None
            values = torch.frombuffer(bytearray(b"".join(content.payload)), dtype=torch.float32)
            senders, weights, values = (forge if lies else lambda copy: copy)(
                (average.senders, average.weights, values)
            )
            await stream.send(CopyHeader(senders, weights), tensor_memory(values.contiguous()))

    monkeypatch.setattr("swarmcli.averaging.round.service.give_copies", give)
    options, bandwidth = AllreduceOptions(part_size_bytes=512), 20_000.0
    async with Swarm([Kind() for _ in range(5)], bandwidth=bandwidth, options=options) as swarm:
        nbytes = sum(tensor.nbytes for tensor in swarm.peers[0].tensors)

        async def cut_off() -> None:  # each sends 1.6 vectors, parts and averages; of these the last tenth is lost
            await asyncio.sleep(0.9 * 1.6 * nbytes / bandwidth)
            for reducer in (1, 2):
                swarm.network.cut(swarm.peers[reducer].peer_id, swarm.peers[4].peer_id)

        outcomes = await swarm.round(cut_off)
        assert len(swarm.check(outcomes)) == 5 and all(isinstance(each, RoundResult) for each in outcomes)
        refusals = [event.reason for event in swarm.events if isinstance(event, PeerRefused)]
        assert any(words in reason for reason in refusals), refusals


@within(2000)
async def test_requests_that_make_no_sense_are_refused() -> None:
    async with Swarm([Kind(), Kind()]) as swarm:
        assert len(swarm.check(await swarm.round())) == 2
        asker, holder = swarm.peers
        ((group_id, holdings),) = holder.service._kept.items()
        request = CopyRequest(group_id, holdings.plan.fingerprint)
        for parts in ((0, 0), (9999,)):
            with pytest.raises(CallRefused, match="not here any more, or was asked for before"):
                await _copy(asker, holder, request, parts)
        with pytest.raises(CallRefused, match="differ from the group's"):
            await _copy(asker, holder, CopyRequest(group_id, bytes(32)), (0,))
        await _copy(asker, holder, request, (1, 0))
        await asyncio.sleep(30)
        with pytest.raises(CallRefused, match="are not here"):
            await _copy(asker, holder, request, (0,))


async def _copy(asker: Peer, holder: Peer, request: CopyRequest, parts: tuple[int, ...]) -> None:
    async with asker.endpoint.stream(holder.peer_id, holder.service.method("copy"), request, timeout=5) as stream:
        with suppress(EndOfStream):
            await stream.receive(CopyTable, _anything)
            await stream.send(CopyParts(parts))
            for _ in parts:
                await stream.receive(CopyHeader, _anything)


def _anything(header: Any, size: int) -> memoryview:
    return memoryview(bytearray(size))
