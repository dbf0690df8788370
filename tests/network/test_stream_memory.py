"""Whose memory a payload is read into, and when nothing may be read at all. Without a network: one end by hand."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.network import Identity, NetworkLimits, Stream, wire
from swarmcli.network.budgets import BUDGETS, Budget
from swarmcli.network.ledger import Account, Ledger
from swarmcli.network.prefix import prefix_of
from swarmcli.network.wire.messages import Piece
from tests.simulation import simulated

from .worlds import Number

MiB = 1 << 20


class FakeConnection:
    def __init__(self) -> None:
        self.peer_id = Identity.from_seed(1).peer_id

    def read_on(self) -> None:
        pass


class FakeChannel:
    """Stands where the stream's channel stands."""

    def __init__(self, limits: NetworkLimits | None = None, budget: Budget = BUDGETS.payloads) -> None:
        self.connection = FakeConnection()
        self.resets: list[str] = []
        self.ledger = Ledger(budget)
        self.account = Account(self.ledger, b"somebody", prefix_of("192.0.2.1"))
        self.stream = Stream(self.connection, limits or NetworkLimits(), "test", self.reset, self.account)  # type: ignore[arg-type]

    def reset(self, reason: str, violation: Exception | None = None) -> None:
        self.resets.append(reason)

    def begin(self, n: int, size: int) -> memoryview:
        """The header of a message has arrived; returns where its payload will go."""
        self._piece = wire.decode(Piece, wire.encode(Piece(Number(n))))
        return self.stream.payload_buffer(self._piece, size)

    def complete(self) -> None:
        self.stream.piece_received(self._piece, 10)


@simulated
async def test_while_a_reader_waits_its_memory_is_lent_and_then_nothing_more_is_read() -> None:
    channel, memory = FakeChannel(), bytearray(MiB)
    reading = asyncio.create_task(channel.stream.receive(Number, lambda message, size: memoryview(memory)[:size]))
    await asyncio.sleep(0)
    lent = channel.begin(1, MiB)
    assert lent.obj is memory and channel.stream.reading_wanted
    lent[:] = b"x" * MiB
    channel.complete()
    # The next payload must find its reader waiting too, or it would have to be copied.
    assert not channel.stream.reading_wanted
    message, payload = await reading
    assert message == Number(1) and payload.obj is memory and payload == b"x" * MiB
    again = asyncio.create_task(channel.stream.receive(Number))
    await asyncio.sleep(0)
    assert channel.stream.reading_wanted
    again.cancel()
    await asyncio.wait([again])
    assert channel.resets == []


@pytest.mark.parametrize("arrived", [False, True])
@simulated
async def test_giving_up_while_memory_is_lent_resets_the_stream(arrived: bool) -> None:
    """Nobody can take the memory back from a connection that writes into it."""

    channel = FakeChannel()
    reading = asyncio.create_task(channel.stream.receive(Number, lambda message, size: memoryview(bytearray(size))))
    await asyncio.sleep(0)
    channel.begin(1, MiB)
    if arrived:
        channel.complete()
    reading.cancel()
    await asyncio.wait([reading])
    assert reading.cancelled() and channel.resets == ["gave up a payload that was arriving"]
