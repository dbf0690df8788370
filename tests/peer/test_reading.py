"""What peers of a run tell each other of the data that they have read."""

from __future__ import annotations

import asyncio
import random

from swarmcli.peer.reading import THERE, ReadingExchange
from swarmcli.training.shared_pass import SharedPass
from tests.optim.optim_swarm import nodes
from tests.simulation import simulated

PARTS = 8


def shared(seed: int) -> SharedPass:
    return SharedPass("swarm/1", rng=random.Random(seed))


@simulated
async def test_a_peer_takes_what_others_have_neither_read_nor_in_hand() -> None:
    async with nodes(2) as (one, other):
        mine, theirs = shared(1), shared(2)
        exchanges = [ReadingExchange(one, "run", mine), ReadingExchange(other, "run", theirs)]
        begun: tuple[int, ...] = ()
        for _ in range(PARTS - 1):
            begun = (*begun, mine.next_part(0, PARTS, 0, begun)[1])
        mine.settle((0,), (begun,))
        for exchange in exchanges:
            await exchange.start()
        assert {theirs.next_part(0, PARTS, 0, ())[1]} == set(range(PARTS)) - set(begun)
        for exchange in exchanges:
            await exchange.close()


@simulated
async def test_what_a_peer_has_read_stays_read_when_it_is_gone_and_what_it_had_in_hand_does_not() -> None:
    async with nodes(3) as (one, other, _):
        mine, theirs = shared(1), shared(2)
        begun: tuple[int, ...] = ()
        for _ in range(PARTS - 2):
            begun = (*begun, mine.next_part(0, PARTS, 0, begun)[1])
        mine.settle((0,), (begun,))
        leaving = ReadingExchange(one, "run", mine)
        await leaving.start()
        await leaving.close()
        await asyncio.sleep(THERE + 5)
        coming = ReadingExchange(other, "run", theirs)
        await coming.start()
        found: tuple[int, ...] = ()
        for _ in range(3):
            found = (*found, theirs.next_part(0, PARTS, 0, found)[1])
        assert set(found) == set(range(PARTS)) - set(begun[:-1])
        await coming.close()


@simulated
async def test_a_stranger_that_writes_nonsense_is_not_heard() -> None:
    async with nodes(2) as (one, liar):
        mine = shared(1)
        exchange = ReadingExchange(one, "run", mine)
        expires = one.endpoint.clock.now() + 600
        await liar.store("run_read", {"sources": [{"number": -1}]}, expires, liar.own_subkey())
        await exchange.start()
        assert mine.next_part(0, PARTS, 0, ())[0] == 0
        await exchange.close()
