"""Copies of averages between members: only what has the announced digest is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.round.allreduce import AllreduceResult
from swarmcli.averaging.round.buffers import Holdings
from swarmcli.averaging.round.messages import CopyHeader, CopyRequest
from swarmcli.compression.base import tensor_memory
from swarmcli.errors import CallRefused, EndOfStream
from swarmcli.events import PeerRefused
from swarmcli.network import Stream
from tests.averaging.rounds import Kind, Peer, Swarm
from tests.simulation import within

Forge = Callable[[CopyHeader, torch.Tensor], tuple[CopyHeader, torch.Tensor]]


def change(**fields: object) -> Forge:
    return lambda header, values: (CopyHeader(**{**_fields(header), **fields}), values)  # type: ignore[arg-type]


def _fields(header: CopyHeader) -> dict[str, object]:
    return {name: getattr(header, name) for name in header.__struct_fields__}


FORGERIES: dict[str, tuple[Forge, str]] = {
    "altered content": (lambda header, values: (header, values + 1), "does not have the content"),
    "not a number": (lambda header, values: (header, values * torch.nan), "does not have the content|NaN"),
    "another digest": (change(digest=bytes(32)), "another one than was promised"),
    "other senders": (change(senders=(0,), weights=(1.0,)), "does not have the content"),
    "senders of no group": (change(senders=(0, 9)), "no tensors in this group|does not fit"),
    "other weights": (change(weights=(1.0, -1.0, 1.0)), "impossible weights|does not fit"),
    "too little": (lambda header, values: (header, values[:1]), "bytes"),
    "by nobody": (change(reducer=77), "by nobody"),
}


@pytest.mark.parametrize(("forge", "words"), FORGERIES.values(), ids=FORGERIES.keys())
@within(2000)
async def test_false_copies_are_refused_and_the_part_comes_from_elsewhere(
    forge: Forge, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member loses two averages of a lost reducer; the first that gives it copies lies."""
    lied: list[int] = []

    async def give(holdings: Holdings, request: CopyRequest, stream: Stream) -> None:
        for index in request.parts:
            average = holdings.get(index)
            content = holdings.content(index)
            assert average is not None and content is not None
            values = torch.frombuffer(bytearray(b"".join(content.payload)), dtype=torch.float32)
            header = CopyHeader(average.part.reducer, average.senders, average.weights, average.digest)
            if not lied or index in lied:
                lied.append(index)
                header, values = forge(header, values)
            await stream.send(header, tensor_memory(values.contiguous()))

    monkeypatch.setattr("swarmcli.averaging.round.service.give_copies", give)

    options, bandwidth = AllreduceOptions(part_size_bytes=512), 20_000.0
    async with Swarm([Kind(), Kind(), Kind(), Kind()], bandwidth=bandwidth, options=options) as swarm:
        nbytes = sum(tensor.nbytes for tensor in swarm.peers[0].tensors)

        async def cut_off() -> None:  # each sends 1.5 vectors, parts and averages; of these the last tenth is lost
            await asyncio.sleep(0.9 * 1.5 * nbytes / bandwidth)
            swarm.network.cut(swarm.peers[1].peer_id, swarm.peers[3].peer_id)
            swarm.network.cut(swarm.peers[2].peer_id, swarm.peers[3].peer_id)

        outcomes = await swarm.round(cut_off)
        assert len(swarm.check(outcomes)) >= 3
        assert all(isinstance(outcome, AllreduceResult) for outcome in outcomes[:3])
        refusals = [event.reason for event in swarm.events if isinstance(event, PeerRefused)]
        assert lied and any(any(word in reason for word in words.split("|")) for reason in refusals), refusals


@pytest.mark.parametrize("parts", [(0, 0), (1, 0), (9999,)])
@within(2000)
async def test_requests_that_make_no_sense_are_refused(parts: tuple[int, ...]) -> None:
    async with Swarm([Kind(), Kind()]) as swarm:
        outcomes = await swarm.round()
        assert len(swarm.check(outcomes)) == 2
        asker, holder = swarm.peers
        ((group_id, holdings),) = holder.service._kept.items()
        request = CopyRequest(group_id, holdings.plan.fingerprint, parts)
        with pytest.raises(CallRefused, match="not all of these"):
            await _copy(asker, holder, request)
        with pytest.raises(CallRefused, match="differ from the group's"):
            await _copy(asker, holder, CopyRequest(group_id, bytes(32), (0,)))
        await _copy(asker, holder, CopyRequest(group_id, holdings.plan.fingerprint, (0, 1)))
        await asyncio.sleep(30)
        with pytest.raises(CallRefused, match="not here any more"):
            await _copy(asker, holder, CopyRequest(group_id, holdings.plan.fingerprint, (0,)))


async def _copy(asker: Peer, holder: Peer, request: CopyRequest) -> None:
    async with asker.endpoint.stream(holder.peer_id, holder.service.method("copy"), request, timeout=5) as stream:
        with suppress(EndOfStream):
            while True:
                await stream.receive(CopyHeader)
