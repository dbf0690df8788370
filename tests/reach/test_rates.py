"""Rates between two peers: as the cables are, and never more than the asked one lends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from swarmcli.errors import CallRefused, ConnectionLost, EndOfStream, NetworkError
from swarmcli.network import Endpoint, Identity
from swarmcli.network.loop_thread import loop_time
from swarmcli.reach import rates
from swarmcli.reach.rates import RatePiece, RateRequest, RateService, measure
from swarmcli.testing import MemoryNetwork
from tests.simulation import simulated

MBIT = 125_000


@asynccontextmanager
async def two_peers(**cables: float) -> AsyncIterator[tuple[MemoryNetwork, Endpoint, Endpoint]]:
    """The second one serves."""
    network = MemoryNetwork(seed=1, **cables)
    made = [Endpoint(network.transport(Identity.from_seed(bytes([number]))), seed=number) for number in range(2)]
    for endpoint in made:
        await endpoint.start()
    made[0].learn(made[1].peer_id, made[1].addresses)
    RateService(made[1]).start()
    try:
        yield network, made[0], made[1]
    finally:
        for endpoint in made:
            await endpoint.close()


@pytest.mark.parametrize("mbit", [0.1, 1, 200])
@simulated
async def test_they_are_what_the_cables_carry_also_if_a_piece_takes_longer_than_anybody_waits(mbit: float) -> None:
    async with two_peers(latency=0.002) as (network, asker, asked):
        network.set_bandwidths(asker.peer_id, uplink=mbit * MBIT, downlink=2 * mbit * MBIT)
        began = loop_time()
        found = await measure(asker, asked.peer_id)
        assert loop_time() - began < 10
        assert found.up == pytest.approx(mbit * MBIT, rel=0.1)
        assert found.down == pytest.approx(2 * mbit * MBIT, rel=0.1)


@simulated
async def test_a_link_that_carries_next_to_nothing_ends_in_an_error_in_time() -> None:
    async with two_peers(latency=0.05, bandwidth=10) as (_, asker, asked):
        with pytest.raises(Exception) as raised:
            await measure(asker, asked.peer_id)
        assert isinstance(raised.value, NetworkError)


@simulated
async def test_the_budget_bounds_what_all_askers_together_take() -> None:
    async with two_peers(latency=0.001, bandwidth=1000 * MBIT) as (_, asker, asked):
        for _ in range(rates.AT_ONCE_BYTES // rates.MEASURED_BYTES // 2):
            await measure(asker, asked.peer_id)
        with pytest.raises(CallRefused) as refused:
            await measure(asker, asked.peer_id)
        assert refused.value.code == "budget"


@simulated
async def test_one_asker_is_served_at_a_time() -> None:
    async with two_peers(latency=0.05, bandwidth=1 * MBIT) as (_, asker, asked):
        request = RateRequest(False)
        async with asker.stream(asked.peer_id, rates.METHOD, request, timeout=5) as first:
            await first.send(RatePiece(), bytes(10))
            with pytest.raises(CallRefused) as refused:
                async with asker.stream(asked.peer_id, rates.METHOD, request, timeout=5) as second:
                    await second.receive(rates.RateResult)
            assert refused.value.code == "busy"


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ((rates.PIECE_BYTES + 1,) * 100, ConnectionLost),
        ((10,) * (rates.MEASURED_BYTES // rates.PIECE_BYTES + 5), EndOfStream),
    ],
)
@simulated
async def test_who_sends_more_than_it_may_is_cut_off(pieces: tuple[int, ...], error: type[Exception]) -> None:
    async with two_peers(latency=0.001) as (_, asker, asked):
        with pytest.raises(error):
            async with asker.stream(asked.peer_id, rates.METHOD, RateRequest(False), timeout=5) as stream:
                for size in pieces:
                    await stream.send(RatePiece(), bytes(size))
                while True:
                    await stream.receive(rates.RateResult)
