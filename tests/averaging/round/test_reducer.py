"""Sums of one reducer: the weighted mean of those whose part arrived whole, and nothing of those who are refused."""

from __future__ import annotations

import asyncio
import functools
import math
import random
from collections.abc import Awaitable, Callable
from typing import ParamSpec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmcli import tasks as tasks_module
from swarmcli.averaging.round.buffers import Average, Inputs, Results
from swarmcli.averaging.round.plan import Layout, Plan
from swarmcli.averaging.round.reducer import Reducer
from swarmcli.compression import (
    BFloat16Compression,
    CompressionBase,
    Float16Compression,
    NoCompression,
    TensorMessage,
    Uniform8BitQuantization,
    extract,
)
from swarmcli.errors import InputRefused
from swarmcli.memory import fresh_memory

NONE = NoCompression()
P = ParamSpec("P")


class Bench:
    """A reducer that is member 0, with other members' tensors at hand."""

    def __init__(
        self,
        tensors: list[torch.Tensor],
        *,
        codec: CompressionBase = NONE,
        part_size: int = 64,
        auxiliary: bool = False,
    ) -> None:
        self.tensors = tensors
        self.plan = Plan.make(Layout.of([tensors[0]], codec), [1.0], part_size)
        self.inputs = [Inputs([tensor]) for tensor in tensors]
        self.results = None if auxiliary else Results(self.plan.layout, fresh_memory(self.plan.layout.nbytes))
        senders = range(1 if auxiliary else 0, len(tensors))
        self.reducer = Reducer(self.plan, 0, senders, None if auxiliary else self.inputs[0], self.results)

    def message(self, sender: int, position: int) -> TensorMessage:
        part = self.plan.parts[position]
        sent = part.codec.compress(self.inputs[sender].part(part))
        return TensorMessage(sent.header, (bytearray(b"".join(bytes(piece) for piece in sent.payload)),))

    async def deliver(self, sender: int, weight: float, *, parts: int | None = None, seed: int = 0) -> None:
        self.reducer.begin(sender, weight)
        for position in range(len(self.plan.parts) if parts is None else parts):
            await asyncio.sleep(random.Random(seed).choice([0, 0.001]))
            await self.reducer.add(sender, self.message(sender, position))

    async def averages(self) -> list[Average]:
        return [await self.reducer.average(position) for position in range(len(self.plan.parts))]

    def mean(self, averages: list[Average]) -> torch.Tensor:
        messages = [average.message for average in averages if average.message is not None]
        return torch.cat([extract(message) for message in messages])


def bounded(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """The test as a function that pytest calls: it fails where somebody waits for ever."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def within_time() -> None:
            async with asyncio.timeout(30):
                await test(*args, **kwargs)

        asyncio.run(within_time())

    return run


def randoms(count: int, numel: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


def weighted_mean(tensors: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    total = sum(tensor.double() * weight for tensor, weight in zip(tensors, weights, strict=True))
    assert isinstance(total, torch.Tensor)
    return total / sum(weights)


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    codec=st.sampled_from([NONE, Float16Compression()]),
    weights=st.lists(st.sampled_from([0.0, 1.0, 3.0, 0.001, 1e6, 1e12]), min_size=2, max_size=5),
    numel=st.integers(1, 100),
    auxiliary=st.booleans(),
    seed=st.integers(0, 1000),
)
@bounded
async def test_weighted_mean(
    dtype: torch.dtype, codec: CompressionBase, weights: list[float], numel: int, auxiliary: bool, seed: int
) -> None:
    bench = Bench(randoms(len(weights), numel, dtype, seed), codec=codec, auxiliary=auxiliary)
    others = list(range(1, len(weights)))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(bench.reducer.run())
        for sender in others:
            sent = None if weights[sender] else 0
            tasks.create_task(bench.deliver(sender, weights[sender], parts=sent, seed=seed + sender))
        if not auxiliary:
            bench.reducer.begin(0, weights[0])
        averages = await bench.averages()
    named = others if auxiliary else [0, *others]
    expected = [index for index in named if weights[index] > 0]
    assert all(average.senders == tuple(expected) for average in averages)
    if not expected:
        assert all(average.message is None for average in averages)
        return
    mean = bench.mean(averages)
    sent = [codec.extract(codec.compress(bench.tensors[index])) if index else bench.tensors[0] for index in expected]
    exact = weighted_mean(sent, [weights[index] for index in expected])
    rough = Float16Compression.name == codec.name or dtype is torch.float16
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float16).eps if rough else 0)
    assert torch.allclose(mean.double(), exact, rtol=2 * eps, atol=2 * eps * 4)
    if bench.results is not None:  # the reducer itself uses exactly what the others decode
        assert torch.equal(bench.results.tensors()[0], mean)


@bounded
async def test_a_sender_that_falls_silent_counts_in_the_parts_that_arrived() -> None:
    bench = Bench(randoms(3, 48, torch.float32))  # three parts of 16
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(bench.reducer.run())
        bench.reducer.begin(0, 1)
        tasks.create_task(bench.deliver(1, 1))
        await bench.deliver(2, 2, parts=1)
        bench.reducer.leave_out(2, "silent")
        bench.reducer.leave_out(2, "said later")
        averages = await bench.averages()
    assert [average.senders for average in averages] == [(0, 1, 2), (0, 1), (0, 1)]
    first, rest = bench.mean(averages).split([16, 32])
    assert torch.allclose(first.double(), weighted_mean([t[:16] for t in bench.tensors], [1, 1, 2]), atol=1e-6)
    assert torch.allclose(rest.double(), weighted_mean([t[16:] for t in bench.tensors[:2]], [1, 1]), atol=1e-6)
    assert bench.reducer.left_out == {2: "silent"}


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, -math.inf, 1e-13, 1e19])
def test_impossible_weights_are_refused(weight: float) -> None:
    with pytest.raises(InputRefused, match="weight"):
        Bench(randoms(2, 4, torch.float32)).reducer.begin(1, weight)


@bounded
async def test_parts_that_do_not_fit_the_plan_are_refused() -> None:
    bench = Bench(randoms(2, 32, torch.float32))
    foreign = [
        (NONE.compress(torch.zeros(15)), "another shape"),
        (Float16Compression().compress(torch.zeros(16)), "cannot be decoded"),
    ]
    with pytest.raises(InputRefused, match="plan does not provide"):
        await bench.reducer.add(1, bench.message(1, 0))  # before it has begun
    bench.reducer.begin(1, 1)
    for message, words in foreign:
        with pytest.raises(InputRefused, match=words):
            await bench.reducer.add(1, message)
    with pytest.raises(InputRefused, match="twice"):
        bench.reducer.begin(1, 1)
    for position in range(2):
        await bench.reducer.add(1, bench.message(1, position))
    with pytest.raises(InputRefused, match="plan does not provide"):
        await bench.reducer.add(1, bench.message(1, 1))


@pytest.mark.parametrize("weights", [(0.1, 0.3), (1e-3, 1e3), (0.0, 1e-12)])
@pytest.mark.parametrize("value", [torch.finfo(torch.float32).max, 1e-20])
@bounded
async def test_sums_of_values_at_either_end_of_the_range_stay_exact(weights: tuple[float, float], value: float) -> None:
    bench = Bench([torch.full((4,), value), torch.full((4,), value)])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(bench.reducer.run())
        bench.reducer.begin(0, weights[0])
        tasks.create_task(bench.deliver(1, weights[1]))
        mean = bench.mean(await bench.averages())
    torch.testing.assert_close(mean, bench.tensors[0], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    ("first", "dtype", "codec"),
    [
        (1, torch.float32, NONE),
        (2, torch.bfloat16, BFloat16Compression()),
        (2, torch.float32, Uniform8BitQuantization()),
    ],
)
@bounded
async def test_values_that_would_overflow_a_sum_are_refused_whoever_comes_first(
    first: int, dtype: torch.dtype, codec: CompressionBase
) -> None:
    bench = Bench([torch.full((16,), each, dtype=dtype) for each in (2.0, 2.0, 1e30)], codec=codec)
    bench.reducer.begin(0, 1.0)
    for sender in (first, 3 - first):
        if sender == 1:
            await bench.deliver(1, 1.0)
            continue
        with pytest.raises(InputRefused, match=r"part 0 holds values up to .* would overflow a sum"):
            await bench.deliver(2, 1e18)
        bench.reducer.leave_out(2, "too large")
    await bench.reducer.run()
    (average,) = await bench.averages()
    assert average.senders == (0, 1)
    assert bench.results is not None and bench.results.tensors()[0].tolist() == [2.0] * 16


@bounded
async def test_a_cancelled_sender_is_counted_if_its_part_is_in_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "OFFLOAD_FROM", 0)
    bench = Bench(randoms(2, 16, torch.float32))
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
    assert torch.allclose(bench.mean([average]).double(), weighted_mean(bench.tensors, [1, 1]), atol=1e-6)


@bounded
async def test_a_sender_far_ahead_waits_when_sums_need_memory_of_their_own() -> None:
    bench = Bench(randoms(3, 96, torch.float32), auxiliary=True)
    bench.reducer.most_beside = 128  # two parts of 16 sums
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(bench.reducer.run())
        ahead = tasks.create_task(bench.deliver(1, 1))
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not ahead.done()
        tasks.create_task(bench.deliver(2, 1))
        averages = await bench.averages()
    assert torch.allclose(bench.mean(averages).double(), weighted_mean(bench.tensors[1:], [1, 1]), atol=1e-6)


def test_the_digest_covers_values_senders_and_weights() -> None:
    async def digest(value: float, weight: float, senders: int) -> bytes:
        bench = Bench([torch.full((4,), float(value))] * senders)
        bench.reducer.begin(0, weight)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(bench.reducer.run())
            for sender in range(1, senders):
                tasks.create_task(bench.deliver(sender, weight))
        return (await bench.averages())[0].digest

    digests = [asyncio.run(digest(*case)) for case in [(1, 1, 2), (2, 1, 2), (1, 2, 2), (1, 1, 3), (1, 1, 2)]]
    assert digests[0] == digests[4] and len(set(digests)) == 4
