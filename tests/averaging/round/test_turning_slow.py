"""Members with unlike lines: one that always was slow gets the time that it needs; the others soon go on without one
whose line or limit turns slow during a round."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from swarmcli.averaging import RoundResult
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.round.pace import quickly
from swarmcli.errors import RoundFailed
from tests.averaging.rounds import Kind, Outcome, Swarm
from tests.simulation import within
from tests.suites import soak

MBIT = 1e6 / 8
SIZE = 2 << 20  # bytes of each member's vector
LINK = 100 * MBIT
CRAWL = 10e3  # bytes per second; the vector takes three and a half minutes
OPTIONS = AllreduceOptions(part_size_bytes=32 << 10, allreduce_timeout=60.0, audit=0)

TRAINER, SENDER = Kind(bandwidth=LINK), Kind(bandwidth=0)
MONITOR = Kind(bandwidth=LINK, auxiliary=True, weight=0.0)
GROUPS = {
    "monitor and two": ([MONITOR, TRAINER, TRAINER], 2),
    "led by the slow one": ([TRAINER, TRAINER, MONITOR], 0),
    "four": ([TRAINER] * 4, 3),
    "five, led by the slow one": ([TRAINER] * 5, 0),
    "the slow one reduces nothing": ([TRAINER, TRAINER, TRAINER, SENDER], 3),
}
# What streams take here is 0.2 s, so their bound is a second and some round trips.
BOUND = 1.2
AT_MOST = 8 * BOUND


class Slow(Swarm):
    """Members whose lines are equally fast. `timed` holds a round, and returns for each member the seconds until it
    had an outcome, and the outcome."""

    def __init__(self, kinds: list[Kind], latency: float = 0.01, options: AllreduceOptions = OPTIONS) -> None:
        super().__init__(kinds, shapes=((SIZE // 4,),), options=options, latency=latency)
        self.quickly = quickly(0.2, 0.0)
        for kind, peer in zip(kinds, self.peers, strict=True):
            self.network.set_bandwidth(peer.peer_id, kind.bandwidth if kind.bandwidth >= 1e5 else LINK)

    async def timed(self, meanwhile: Callable[[], Awaitable[None]] | None = None) -> list[tuple[float, Outcome]]:
        loop, group = asyncio.get_running_loop(), self.group()
        began = loop.time()

        async def until_done(index: int) -> tuple[float, Outcome]:
            outcome = await self.take_part(self.peers[index], group)
            return loop.time() - began, outcome

        tasks = [asyncio.create_task(until_done(index)) for index in range(len(self.peers))]
        if meanwhile is not None:
            await meanwhile()
        return list(await asyncio.gather(*tasks))


def check_others(swarm: Slow, ends: list[tuple[float, Outcome]], slow: int, at_most: float) -> None:
    """The others soon have the result, with all of their own tensors in it. Where the slow one reduces, they may know
    instead that there is no result, and by whose fault."""
    swarm.check([outcome for _, outcome in ends])
    culprit = swarm.peers[slow].peer_id
    for index, (seconds, outcome) in enumerate(ends):
        if index == slow:
            continue
        assert seconds < at_most, f"{index} took {seconds:.1f} s: {outcome}"
        if swarm.peers[slow].kind.bandwidth and isinstance(outcome, RoundFailed):
            assert culprit in outcome.suspects
            continue
        assert isinstance(outcome, RoundResult), outcome
        if not swarm.peers[index].kind.auxiliary:
            others = {index for index, peer in enumerate(swarm.peers) if not peer.kind.auxiliary and index != slow}
            for average in outcome.parts:
                assert others <= set(average.senders), outcome.left_out


LIMITS = [(CRAWL, None), (None, CRAWL), (CRAWL, CRAWL)]
LIMITED = [
    ("led by the slow one", None, CRAWL, 0.2),
    ("four", CRAWL, CRAWL, 0.0),
    ("the slow one reduces nothing", CRAWL, None, 0.0),
]


@pytest.mark.parametrize(
    ("group", "upload", "download", "after"),
    [
        *LIMITED,
        *soak(
            (group, *limits, after)
            for group in GROUPS
            for limits in LIMITS
            for after in (0.0, 0.05, 0.1, 0.2)
            if (group, *limits, after) not in LIMITED
        ),
    ],
)
@within(2000)
async def test_a_limit_that_is_set_in_mid_round_holds_nobody_else_up(
    group: str, upload: float | None, download: float | None, after: float
) -> None:
    kinds, slow = GROUPS[group]

    async with Slow(kinds) as swarm:

        async def limit() -> None:
            await asyncio.sleep(after)
            swarm.peers[slow].endpoint.limit_rates(upload, download)

        check_others(swarm, await swarm.timed(limit), slow, AT_MOST)


@pytest.mark.parametrize(
    ("group", "at_most", "uplink", "downlink"),
    [
        ("monitor and two", 4.0, 1e5, LINK),
        *soak([("four", 12.0, LINK, 1e5)]),
    ],
)
@within(2000)
async def test_a_jammed_link_holds_nobody_else_up_for_long(
    group: str, at_most: float, uplink: float, downlink: float
) -> None:
    kinds, slow = GROUPS[group]

    async with Slow(kinds) as swarm:
        swarm.network.set_bandwidths(swarm.peers[slow].peer_id, uplink=uplink, downlink=downlink)
        check_others(swarm, await swarm.timed(), slow, at_most)


@pytest.mark.parametrize("slow", [0, 1])
@within(2000)
async def test_a_pair_of_which_one_turns_slow_soon_knows_that_there_is_no_average(slow: int) -> None:
    async with Slow([TRAINER] * 2) as swarm:
        swarm.network.set_bandwidths(swarm.peers[slow].peer_id, uplink=CRAWL, downlink=LINK)
        seconds, outcome = (await swarm.timed())[1 - slow]
        assert isinstance(outcome, RoundFailed), outcome
        assert seconds < BOUND + 5


@within(2000)
async def test_what_the_last_rounds_took_counts_where_the_group_knows_no_figures() -> None:
    kinds = [replace(kind, bandwidth=1.0) for kind in [MONITOR, TRAINER, TRAINER]]

    async with Slow(kinds) as swarm:
        for _ in range(3):
            assert max(seconds for seconds, _ in await swarm.timed()) < 1
        swarm.peers[2].endpoint.limit_rates(CRAWL, None)
        check_others(swarm, await swarm.timed(), 2, AT_MOST)


@pytest.mark.parametrize("known", [False, *soak([True])])
@within(2000)
async def test_honest_members_far_apart_on_unequal_links_are_all_waited_for(known: bool) -> None:
    speeds = (10.0, 40.0, 100.0, 20.0)
    kinds = [Kind(bandwidth=speed * (MBIT if known else 1)) for speed in speeds]

    async with Slow(kinds, latency=0.075) as swarm:
        for speed, peer in zip(speeds, swarm.peers, strict=True):
            swarm.network.set_bandwidth(peer.peer_id, speed * MBIT)
        for _ in range(2):
            for _, outcome in await swarm.timed():
                assert isinstance(outcome, RoundResult) and not outcome.left_out


@within(2000)
async def test_who_still_computes_is_waited_for_however_quick_the_rounds_are() -> None:
    kinds, late = GROUPS["monitor and two"]

    async with Slow(kinds) as swarm:
        await swarm.timed()
        swarm.peers[late].kind = replace(kinds[late], delay=20.0)
        for seconds, outcome in await swarm.timed():
            assert isinstance(outcome, RoundResult) and not outcome.left_out
            assert seconds < 21


@within(2000)
async def test_who_receives_slowly_does_not_hold_the_others_back() -> None:
    async with Slow([SENDER, TRAINER, TRAINER, TRAINER]) as swarm:
        swarm.quickly = math.inf
        swarm.network.set_bandwidths(swarm.peers[0].peer_id, uplink=LINK, downlink=5 * MBIT)
        (slow, _), *others = ends = await swarm.timed()
        assert all(isinstance(outcome, RoundResult) and not outcome.left_out for _, outcome in ends)
        assert slow >= SIZE / (5 * MBIT)
        assert max(seconds for seconds, _ in others) < slow / 4  # with two round trips more than if all had voted


@within(2000)
async def test_equal_links_are_used_nearly_in_full() -> None:
    async with Slow([TRAINER] * 4) as swarm:
        for peer in swarm.peers:
            swarm.network.set_bandwidth(peer.peer_id, 20 * MBIT)
        swarm.quickly, allowed = math.inf, 2 * 3 / 4 * SIZE / (20 * MBIT)
        assert max(seconds for seconds, _ in await swarm.timed()) < allowed / 0.85
