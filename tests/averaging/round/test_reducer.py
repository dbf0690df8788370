"""Sums of one reducer: bounded in memory, and of all whose part is in them."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarmcli import concurrency
from swarmcli.averaging.round.buffers import Average, Inputs, Results
from swarmcli.averaging.round.plan import Layout, Plan
from swarmcli.averaging.round.reducer import Reducer
from swarmcli.compression import TensorMessage, extract
from swarmcli.memory import fresh_memory
from tests.simulation import in_real_time


class Bench:
    """A reducer that is member 0, with other members' tensors at hand."""

    def __init__(
        self,
        tensors: list[torch.Tensor],
        *,
        auxiliary: bool = False,
    ) -> None:
        self.tensors = tensors
        self.plan = Plan.make(Layout.of([tensors[0]]), [1.0], 64)
        self.inputs = [Inputs([tensor]) for tensor in tensors]
        self.results = None if auxiliary else Results(self.plan.layout, fresh_memory(self.plan.layout.nbytes))
        senders = range(1 if auxiliary else 0, len(tensors))
        self.reducer = Reducer(self.plan, 0, senders, None if auxiliary else self.inputs[0], self.results)

    def message(self, sender: int, position: int) -> TensorMessage:
        part = self.plan.parts[position]
        sent = part.codec.compress(self.inputs[sender].part(part))
        return TensorMessage(sent.header, (bytearray(b"".join(bytes(piece) for piece in sent.payload)),))

    async def deliver(self, sender: int, weight: float) -> None:
        self.reducer.begin(sender, weight)
        for position in range(len(self.plan.parts)):
            await self.reducer.add(sender, self.message(sender, position))

    async def averages(self) -> list[Average]:
        return [await self.reducer.average(position) for position in range(len(self.plan.parts))]

    def mean(self, averages: list[Average]) -> torch.Tensor:
        messages = [average.message for average in averages if average.message is not None]
        return torch.cat([extract(message) for message in messages])


def randoms(count: int, numel: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(numel, generator=generator) for _ in range(count)]


@in_real_time
async def test_a_cancelled_sender_is_counted_if_its_part_is_in_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "OFFLOAD_FROM", 0)
    bench = Bench(randoms(2, 16))
    bench.reducer.begin(0, 1)
    bench.reducer.begin(1, 1)
    adding = asyncio.create_task(bench.reducer.add(1, bench.message(1, 0)))
    await asyncio.sleep(0)
    adding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adding
    bench.reducer.leave_out(1, "gone")
    await bench.reducer.run()
    (average,) = await bench.averages()
    assert average.senders == (0, 1)
    torch.testing.assert_close(bench.mean([average]), torch.stack(bench.tensors).mean(0))


@in_real_time
async def test_a_sender_far_ahead_waits_when_sums_need_memory_of_their_own() -> None:
    bench = Bench(randoms(3, 96), auxiliary=True)
    bench.reducer.most_beside = 128  # two parts of 16 sums
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(bench.reducer.run())
        ahead = tasks.create_task(bench.deliver(1, 1))
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not ahead.done()
        tasks.create_task(bench.deliver(2, 1))
        averages = await bench.averages()
    torch.testing.assert_close(bench.mean(averages), torch.stack(bench.tensors[1:]).mean(0))
