"""What a line can carry: a peer measures it in rounds and claims it within bounds; the shares come near the optimum."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmcli.averaging.bandwidth import (
    MAX_CLAIM,
    MOST_ABOVE_MEDIAN,
    LineGauge,
    comparable,
)
from swarmcli.averaging.checks import MAX_BANDWIDTH
from swarmcli.averaging.config import AllreduceOptions, AveragerConfig
from swarmcli.averaging.group import Group, Member
from swarmcli.averaging.shares import reducing_shares, slowest_line
from swarmcli.network import Identity
from swarmcli.network.context import Traffic
from swarmcli.testing import virtual_time
from tests.averaging.averagers import Averagers, all_results
from tests.simulation import simulated, within

ELEMENTS = 1 << 20
SMALL_PARTS = AllreduceOptions(part_size_bytes=64 << 10)
speeds = st.none() | st.floats(0, 1e12)


class Cable:
    """Something that passes bytes at a given speed."""

    def __init__(self) -> None:
        self.total = Traffic()

    async def carry(self, seconds: float, sent: float, received: float) -> None:
        for _ in range(round(seconds * 100)):
            await asyncio.sleep(0.01)
            self.total += Traffic(round(sent / 100), round(received / 100))


def test_a_limit_is_claimed_at_once_and_what_it_hides_is_remembered() -> None:
    limit: float | None = 1e5

    async def main() -> None:
        nonlocal limit
        cable = Cable()
        gauge = LineGauge(lambda: cable.total, lambda: limit)
        assert gauge.claim == 1e5, "nothing is measured, and it is not faster than this"
        limit = None
        with gauge.watching():
            await cable.carry(2, 8e6, 8e6)
        limit = 1e5
        assert gauge.claim == 1e5
        for _ in range(5):
            with gauge.watching():
                await cable.carry(2, 1e5, 1e5)
        limit = None
        assert gauge.claim == pytest.approx(8e6, rel=0.2), "the line is what it was before the limit"

    virtual_time.run(main())


def test_a_round_in_which_this_process_stood_still_or_its_limit_changed_shows_no_line() -> None:
    limit: float | None = None

    async def main() -> None:
        nonlocal limit
        loop, cable = asyncio.get_running_loop(), Cable()
        assert isinstance(loop, virtual_time.VirtualTimeLoop)
        gauge = LineGauge(lambda: cable.total, lambda: limit)
        with gauge.watching():
            await cable.carry(2, 8e6, 8e6)
        assert gauge.shows
        with gauge.watching():
            await cable.carry(0.5, 8e6, 8e6)
            loop.stall(10)
            await cable.carry(0.1, 8e6, 8e6)
        assert not gauge.shows
        assert gauge.claim == pytest.approx(8e6, rel=0.2)
        with gauge.watching():
            await cable.carry(60, 8e6, 8e6)
        assert gauge.shows, "rare ticks of a long round are no standstill"
        limit = 1e5
        with gauge.watching():
            await cable.carry(2, 1e5, 1e5)
            limit = None
            await cable.carry(0.1, 1e5, 1e5)
            limit = 1e5
        assert not gauge.shows

    virtual_time.run(main())


async def watched(*stretches: tuple[float, float, float]) -> float | None:
    """What a gauge claims after a round of (seconds, bytes per second sent, and received)."""
    cable = Cable()
    gauge = LineGauge(lambda: cable.total)
    with gauge.watching():
        for stretch in stretches:
            await cable.carry(*stretch)
    return gauge.claim


def claim_after(*stretches: tuple[float, float, float]) -> float | None:
    return virtual_time.run(watched(*stretches))


def test_the_fastest_moments_count_in_the_slower_direction() -> None:
    assert claim_after((10, 1e6, 1e6)) == pytest.approx(1e6, rel=0.2)
    assert claim_after((3, 2e6, 8e6), (20, 1e5, 1e5)) == pytest.approx(2e6, rel=0.2), "the others were slow at the end"
    assert claim_after((3, 8e6, 1e5), (3, 1e5, 8e6)) == pytest.approx(8e6, rel=0.2), "not at the same time"


def test_rounds_that_show_nothing_leave_nothing_known() -> None:
    assert claim_after((0.1, 1e6, 1e6)) is None, "too short"
    assert claim_after((10, 1e6, 0)) is None, "nothing came"
    assert claim_after((10, 1e10, 1e10)) == MAX_CLAIM


@simulated
async def test_a_rise_is_believed_sooner_than_a_fall() -> None:
    cable = Cable()
    gauge = LineGauge(lambda: cable.total)
    claims = []
    for speed in (1e6, 16e6, 16e6, 1e6, 1e6):
        with gauge.watching():
            await cable.carry(2, speed, speed)
        claims.append(gauge.claim or 0.0)
    first, risen, higher, fallen, lower = claims
    assert first < risen < higher and lower < fallen < higher
    assert risen / first > higher / fallen


@simulated
async def test_long_rounds_take_no_more_memory_than_short_ones() -> None:
    cable = Cable()
    gauge = LineGauge(lambda: cable.total)
    with gauge.watching():
        await cable.carry(150, 1e6, 1e6)
        assert len(gauge._samples) <= 130
    assert gauge.claim == pytest.approx(1e6, rel=0.2)


def test_what_users_gave_replaces_their_own_figures_and_is_relative_to_each_other() -> None:
    assert comparable([None, 3.0, 1.5], [5e6, 1e6, None]) == [5e6, 10e6, 5e6]
    assert comparable([None, 3.0, 1.0], [None] * 3) == [1.0, 3.0, 1.0]
    assert comparable([100.0, 200.0, 400.0], [None, 1e6, 1e6]) == [0.5, 1.0, 2.0]
    assert comparable([0.0, None, None], [4e6, 4e6, None]) == [0.0, 4e6, 4e6]
    assert comparable([None, None], [None, None]) == [1.0, 1.0]
    assert comparable([0.0, 0.0], [None, 1e6]) == [0.0, 0.0]


@pytest.mark.parametrize("given", [1e-300, 1.0, 1e12])
def test_what_one_user_gives_leaves_all_others_as_they_were_measured(given: float) -> None:
    """A stranger's figure once switched off what everybody had measured."""
    links = [1e6, 2e6, 8e6, 8e6]
    assert comparable([None] * 4 + [given], [*links, None])[:4] == comparable([None] * 4, links)
    assert comparable([None, None, 1.0, 2.0, given], [1e6, 2e6, None, None, 5e6])[:2] == [1e6, 2e6]


def test_no_legal_figure_overflows_a_mean() -> None:
    figures = comparable([MAX_BANDWIDTH, MAX_BANDWIDTH, None], [None] * 3)
    assert figures == [1.0, 1.0, 1.0]
    for figure in (1.7e308, math.inf, math.nan, -1.0, 2 * MAX_BANDWIDTH):
        with pytest.raises(ValueError, match="bandwidth"):
            AveragerConfig(prefix="test", bandwidth=figure)
        with pytest.raises(ValueError, match="bandwidth"):
            Member(Identity.from_seed(1).peer_id, bandwidth=figure)


def test_links_that_are_nearly_alike_count_as_alike() -> None:
    assert comparable([None] * 4, [9e6, 10e6, 11e6, 4e6]) == [9.5e6, 9.5e6, 9.5e6, 4e6]


def test_a_boaster_is_not_believed() -> None:
    honest = [1e6] * 5
    assert comparable([None] * 6, [*honest, 1e9]) == [*honest, MOST_ABOVE_MEDIAN * 1e6]
    assert comparable([None], [1e15]) == [MAX_CLAIM]


@given(st.lists(st.tuples(speeds, speeds), min_size=1, max_size=6))
def test_every_mixture_gives_finite_bandwidths(group: list[tuple[float | None, float | None]]) -> None:
    own, measured = zip(*group, strict=True)
    figures = comparable(own, measured)
    assert len(figures) == len(group) and all(math.isfinite(figure) and figure >= 0 for figure in figures)
    assert all(figure == 0 for figure, wish in zip(figures, own, strict=True) if wish == 0)


@dataclass(frozen=True)
class Round:
    group: Group
    seconds: float  # of the all-reduce, until the last member has everything
    optimum: float  # that the best shares allow when every bandwidth is known


async def rounds_over(links: Sequence[tuple[float, float]], count: int) -> list[Round]:
    """`count` rounds of peers, one for each of `links`: its line's bytes per second (out, in)."""
    async with Averagers(3) as swarm:
        peers = await swarm.add(len(links), shapes=((ELEMENTS,),), allreduce=SMALL_PARTS)
        slower = {peer.peer_id: min(link) for peer, link in zip(peers, links, strict=True)}
        for peer, (uplink, downlink) in zip(peers, links, strict=True):
            swarm.network.set_bandwidths(peer.peer_id, uplink=uplink, downlink=downlink)
        rounds = []
        for _ in range(count):
            results = await all_results([peer.begin(timeout=300) for peer in peers])
            seconds = max(result.seconds["running all-reduce"] for result in results)
            group = results[0].group
            known = [dataclasses.replace(member, bandwidth=slower[member.peer_id]) for member in group.members]
            best = slowest_line(known, reducing_shares(known, ELEMENTS)) * ELEMENTS * 4
            rounds.append(Round(group, seconds, best))
        return rounds


MBIT = 1e6 / 8
SLOW_OUT = [(10 * MBIT, 100 * MBIT), (100 * MBIT, 100 * MBIT), (100 * MBIT, 100 * MBIT)]


@within(3600)
async def test_shares_come_near_the_optimum_by_what_was_measured() -> None:
    first, *_, last = await rounds_over(SLOW_OUT, 2)
    assert len(set(first.group.part_shares)) == 1, "nothing is known at first"
    assert last.seconds < first.seconds
    assert last.optimum / last.seconds >= 0.8


@pytest.mark.parametrize("seed", [3, 5])  # in these orders a member that gets averages for 40 s looks at a part
@within(3600)
async def test_the_shares_follow_a_limit_and_nobody_blames_who_has_one(seed: int) -> None:
    """1 MiB at 25 kB/s takes twice as long as a sender is given that tells nothing of its line."""
    async with Averagers(seed) as swarm:
        options = dataclasses.replace(SMALL_PARTS, allreduce_timeout=80.0)
        peers = await swarm.add(3, shapes=((ELEMENTS // 4,),), allreduce=options)
        for peer in peers:
            swarm.network.set_bandwidth(peer.peer_id, 20 * MBIT)
        limited = peers[1]

        async def share(upload: float | None, download: float | None) -> float:
            limited.endpoint.limit_rates(upload, download)
            results = await all_results([peer.begin(timeout=300) for peer in peers])
            assert not any(result.left_out for result in results)
            assert not any(peer.core.trust.has_no_seat(other.peer_id) for peer in peers for other in peers)
            group = results[0].group
            index = [member.peer_id for member in group.members].index(limited.peer_id)
            return group.part_shares[index]

        assert await share(None, None) == pytest.approx(1 / 3)
        assert await share(25e3, None) < 0.05
        assert await share(None, 25e3) < 0.05
        assert await share(None, None) > 0.3
