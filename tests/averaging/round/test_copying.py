"""Copies of averages between members: only what its reducers have signed is taken."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from swarmcli.averaging import RoundResult
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.round.buffers import Holdings, Results
from swarmcli.averaging.round.messages import CopyHeader, CopyHeld, CopyRequest, CopyTable
from swarmcli.compression.base import tensor_memory
from swarmcli.errors import CallRefused, EndOfStream, NetworkError
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
    "twice the weights": (lambda copy: (copy[0], tuple(2 * w for w in copy[1]), copy[2]), "does not have the content"),
    "too little": (lambda copy: (*copy[:2], copy[2][:1]), "does not have the content"),
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
        _, held = await stream.receive(CopyHeld, _anything)
        for part in holdings.unlike(bytes(held)):
            average = holdings.get(part)
            assert average is not None and holdings.results is not None
            values = holdings.results.part(part)
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
async def test_whoever_asks_gets_the_parts_that_it_has_not_for_a_while() -> None:
    async with Swarm([Kind(), Kind()]) as swarm:
        assert len(swarm.check(await swarm.round())) == 2
        asker, holder = swarm.peers
        ((group_id, holdings),) = holder.service._kept.items()
        request, table = CopyRequest(group_id, holdings.plan.fingerprint), holdings.tables[0]
        assert await _copy(asker, holder, request, table) == 0
        assert await _copy(asker, holder, request, bytes(32) + table[32:]) == 1
        with pytest.raises(CallRefused, match="differ from the group's"):
            await _copy(asker, holder, CopyRequest(group_id, bytes(32)), table)
        with pytest.raises(NetworkError):
            await _copy(asker, holder, request, table + table)
        await asyncio.sleep(30)
        with pytest.raises(CallRefused, match="are not here"):
            await _copy(asker, holder, request, table)


@within(2000)
async def test_whoever_takes_copies_slowly_holds_no_memory_beside_a_later_round() -> None:
    options = AllreduceOptions(part_size_bytes=1 << 18)
    async with Swarm([Kind() for _ in range(4)], shapes=((1000, 1000),), options=options) as swarm:
        holder, *_, slow = swarm.peers
        kept, ended = list[weakref.ref[Results]](), list[str]()

        async def take_slowly(request: CopyRequest, nbytes: int) -> None:
            """The slow peer asks for all of them, and reads nothing."""
            method = holder.service.method("copy")
            try:
                async with slow.endpoint.stream(holder.peer_id, method, request, timeout=5) as stream:
                    await stream.receive(CopyTable, _anything)
                    await stream.send(CopyHeld(), (bytes(nbytes),))
                    await asyncio.sleep(100)
                    while True:
                        await stream.receive(CopyHeader, _anything)
            except CallRefused as error:
                ended.append(error.code)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                swarm.check(await swarm.round())
                ((group_id, holdings),) = holder.service._kept.items()
                assert holdings.results is not None
                kept.append(weakref.ref(holdings.results))
                request = CopyRequest(group_id, holdings.plan.fingerprint)
                tasks.create_task(take_slowly(request, len(holdings.tables[0])))
                del holdings
                await asyncio.sleep(5)
            gc.collect()
            assert [each() is not None for each in kept] == [False, False, True]
            holder.service.make_room()
        assert ended == ["over"] * 3


@within(2000)
async def test_strangers_get_no_copies() -> None:
    async with Swarm([Kind(), Kind()]) as swarm, Swarm([Kind()], seed=1) as others:
        swarm.check(await swarm.round())
        holder, (stranger,) = swarm.peers[0], others.peers
        ((group_id, holdings),) = holder.service._kept.items()
        ask = CopyRequest(group_id, holdings.plan.fingerprint)
        with pytest.raises(CallRefused, match="only members"):
            await holder.service._copy(stranger.peer_id, ask, None)  # type: ignore[arg-type]


async def _copy(asker: Peer, holder: Peer, request: CopyRequest, held: bytes) -> int:
    """Returns how many parts arrive."""
    came = 0
    async with asker.endpoint.stream(holder.peer_id, holder.service.method("copy"), request, timeout=5) as stream:
        await stream.receive(CopyTable, _anything)
        await stream.send(CopyHeld(), (held,))
        with suppress(EndOfStream):
            while True:
                await stream.receive(CopyHeader, _anything)
                came += 1
    return came


def _anything(header: Any, size: int) -> memoryview:
    return memoryview(bytearray(size))
