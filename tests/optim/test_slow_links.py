"""Peers whose lines are slow: the run waits for some of them, and does not wait for others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from swarmcli.network.identity import PeerID
from swarmcli.optim.config import Role
from swarmcli.optim.core import OptimizerCore
from swarmcli.testing import virtual_time
from swarmcli.testing.memory_cables import Latency
from swarmcli.testing.memory_network import MemoryTransport
from tests.optim.optim_swarm import Swarm, meanwhile, until
from tests.optim.unlike import Unlike
from tests.simulation import now
from tests.suites import soak

NBYTES = 1_200_000  # of a round, as float32

Story = Callable[[Swarm, list[Unlike]], Awaitable[None]]


def tell(
    story: Story,
    roles: list[tuple[Role, float]],
    *,
    elements: int,
    latency: Latency = 0.02,
    bandwidth: float | None = None,
    seed: int = 1,
) -> None:
    """Peers of these roles and paces take part until the story has ended; an epoch has 200 samples."""

    async def main() -> None:
        async with Swarm(seed, latency=latency, bandwidth=bandwidth) as swarm:
            peers = [Unlike(await swarm.node(), role, 200, pace, elements) for role, pace in roles]
            for peer in peers:
                await swarm.start(peer.core)
            async with meanwhile(*(peer.run() for peer in peers)):
                await story(swarm, peers)

    virtual_time.run(main(), seed=seed, timeout=5000)


async def epochs_of(peers: list[Unlike], count: int) -> list[float]:
    """The seconds of each of the next `count` epochs, each until all peers have ended it."""
    took, epoch = [], max(peer.epoch for peer in peers)
    for end in range(epoch + 1, epoch + 1 + count):
        began = now()
        await until(lambda end=end: min(peer.epoch for peer in peers) >= end, every=0.1)
        took.append(now() - began)
    return took


@pytest.mark.parametrize("known", [False, *soak([True])])
@pytest.mark.parametrize("seed", range(10))
def test_a_run_goes_at_the_pace_of_its_lone_trainer_however_long_that_sends(seed: int, known: bool) -> None:
    """1.2 MB at 10 kB/s take two minutes, and the options ask for rounds of one minute at most. Where no limit tells
    how slow the line is, a round that fails tells it."""
    drawn = random.Random(seed)
    pace, latency = drawn.uniform(20, 100), drawn.uniform(0.005, 0.1)

    async def story(swarm: Swarm, peers: list[Unlike]) -> None:
        await epochs_of(peers, 2)
        if known:
            peers[0].limit(10e3, None)
        else:
            swarm.network.set_bandwidths(peers[0].node.peer_id, uplink=10e3, downlink=None)
        first, *others = await epochs_of(peers, 2)
        usual = 200 / pace + NBYTES / 10e3
        failed = 0 if known else 60  # seconds that the round has which fails
        assert first < 1.5 * usual + failed and max(others) < 1.5 * usual, (first, others)

    tell(story, [("trainer", pace), ("monitor", 0.0)], elements=NBYTES // 4, latency=latency)


SLOW_LINES = {"10 kB/s": (10e3, 10e3, 0.4), "100 kB/s in": (10e3, 100e3, 0.4), "1 MB/s in": (10e3, 1e6, 0.4)}


@pytest.mark.parametrize(
    ("others", "line"),
    [(2, "10 kB/s"), *soak([(1, "10 kB/s"), (7, "10 kB/s"), *((4, line) for line in SLOW_LINES)])],
)
def test_a_newcomer_behind_a_slow_line_that_no_limit_tells_of_hears_so_and_costs_the_others_nothing(
    others: int, line: str
) -> None:
    """Its download tells how slow the line is, or a second download does that leaves it out of step: it never gets into
    a round, and does not download for ever. From then on all that is neither averaging nor state takes a tenth of its
    line at most."""
    up, down, latency = SLOW_LINES[line]
    far: list[PeerID] = []

    async def story(swarm: Swarm, quick: list[Unlike]) -> None:
        usual = max((await epochs_of(quick, 3))[1:])
        slow = Unlike(await swarm.node(), "trainer", 200, 20.0, NBYTES // 4)
        far.append(slow.node.peer_id)
        swarm.network.set_bandwidths(slow.node.peer_id, uplink=up, downlink=down)
        began, first = now(), quick[0].epoch
        await swarm.start(slow.core)
        async with meanwhile(slow.run()):
            await until(lambda: any("samples cannot count" in text for text in slow.said), every=0.1)
            assert now() - began < 60
            took = await epochs_of(quick, 4)
            assert max(took) < 2 * usual + 3, took
            before = slow.node.endpoint.moved[""]
            await asyncio.sleep(60.0)
            rest = slow.node.endpoint.moved[""] - before
            assert max(rest.sent / up, rest.received / down) < 0.1 * 60, rest
            assert quick[0].epoch - first > 0.9 * (now() - began) / usual - 1
            told = next(text for text in slow.said if "samples cannot count" in text)
            assert "your line has been seen to need" in told
            assert "waits, since it could not even follow" in told or down > 100e3

    def ways(a: PeerID, b: PeerID) -> float:
        return latency if a in far or b in far else 0.02

    paces = [("trainer", 20.0 / others)] * others
    tell(story, paces, elements=NBYTES // 4, latency=ways, bandwidth=10e6)


def test_of_a_pair_whose_line_turns_slow_one_goes_on() -> None:
    """Neither can tell whose line it is: they come to the same answer, and the other one waits."""

    async def story(swarm: Swarm, peers: list[Unlike]) -> None:
        await epochs_of(peers, 2)
        swarm.network.set_bandwidths(peers[0].node.peer_id, uplink=10e3, downlink=10e3)
        began = now()
        await until(lambda: any("samples cannot count" in text for peer in peers for text in peer.said))
        assert now() - began < 60
        goes_on, waits = sorted(peers, key=lambda peer: peer.node.peer_id)
        assert waits.core.pausing.is_asked and not goes_on.core.pausing.is_asked
        took = await epochs_of([goes_on], 4)
        assert max(took) < 2 * 200 / 20 + 3, took

    tell(story, [("trainer", 20.0), ("trainer", 20.0)], elements=NBYTES // 4, bandwidth=10e6)


@pytest.mark.parametrize("seed", [5, 19, *soak([4, 17, 33])])
def test_a_dead_connection_is_no_slow_line(seed: int) -> None:
    """One of five is cut off in the middle of a round, or while it asks what became of one. Nothing passes for a while,
    which says nothing of its line: it counts again soon after the cut."""
    drawn = random.Random(seed)
    latency, bandwidth = drawn.uniform(0.002, 0.08), drawn.choice([0.5e6, 1e6, 5e6, None])
    cut, moment = drawn.uniform(3, 25), drawn.uniform(0, 4)

    async def story(swarm: Swarm, peers: list[Unlike]) -> None:
        lost, *others = peers
        assert swarm.contact is not None and isinstance(lost.core, OptimizerCore)
        await epochs_of(peers, 4)
        await asyncio.sleep(moment)
        swarm.network.partition([lost.node.peer_id], [swarm.contact.peer_id, *(peer.node.peer_id for peer in others)])
        await asyncio.sleep(cut)
        swarm.network.heal()
        began, rounds = now(), set[int]()

        def counts() -> bool:
            group = others[0].core._group.last
            if group is not None and lost.node.peer_id in group.bids and group.bids[lost.node.peer_id].sends:
                rounds.add(others[0].epoch)
            return len(rounds) >= 3

        await until(counts, every=0.1)
        assert now() - began < 30, lost.said

    tell(story, [("trainer", 30.0)] * 5, elements=50_000, latency=latency, bandwidth=bandwidth, seed=seed)


def test_the_first_connection_that_breaks_in_a_round_costs_nobody_its_seat() -> None:
    """The largest sender of three, which reduces nothing, loses its connections in the middle of a round."""

    async def main() -> None:
        async with Swarm(1, latency=0.02, bandwidth=1e6) as swarm:
            big = Unlike(await swarm.node(), "trainer", 200, 60.0, 250_000, bandwidth=0.0)
            others = [Unlike(await swarm.node(), "trainer", 200, 15.0, 250_000) for _ in range(2)]
            for peer in (big, *others):
                await swarm.start(peer.core)
            async with meanwhile(*(peer.run() for peer in (big, *others))):
                await epochs_of([big, *others], 3)
                endpoint, transport = big.node.endpoint, big.node.endpoint.transport
                assert isinstance(transport, MemoryTransport)
                before, sent = 0, 0
                while before == 0 or sent - before < 50_000:  # until it sends a round's parts
                    await asyncio.sleep(0.1)
                    before, sent = sent, endpoint.passed().sent
                transport.reset("the router changed its address")
                trusts = [peer.core._group.averager.trust for peer in others]
                for _ in range(40):
                    await asyncio.sleep(0.5)
                    assert not any(trust.has_no_seat(big.node.peer_id) for trust in trusts)

    virtual_time.run(main(), seed=1, timeout=5000)


def test_who_is_given_up_as_too_slow_learns_that_its_line_is_slow() -> None:
    """Its reducers reset its streams; what they reset is no line that broke."""

    async def story(swarm: Swarm, peers: list[Unlike]) -> None:
        slow, *others = peers
        await epochs_of(peers, 3)
        swarm.network.set_bandwidths(slow.node.peer_id, uplink=20e3, downlink=10e6)
        (first,) = await epochs_of(others, 1)
        assert first < 15, "one round is spoiled, not two"
        assert any("samples cannot count" in text for text in slow.said)

    tell(story, [("trainer", 20.0)] * 4, elements=100_000, bandwidth=10e6)


SLOW_UPLINKS = {"one of three": (10e3, None, None), "three": (20e3, 20e3, 20e3)}


@pytest.mark.parametrize("slow", ["one of three", *soak(["three"])])
@pytest.mark.parametrize("seed", range(10))
def test_trainers_whose_slow_uplinks_nobody_tells_stay_in_one_run(seed: int, slow: str) -> None:
    """Rounds of 1.2 MB; the options ask for a minute at most. Where all lines are slow the first round fails, and tells
    what the next ones need; where one is slow, its trainer follows the others. With odd seeds the lines turn slow after
    two epochs, with even seeds they are slow from the start."""
    drawn, uplinks = random.Random(seed), SLOW_UPLINKS[slow]
    trainers = [drawn.uniform(20, 100) for _ in uplinks]
    latency, count = drawn.uniform(0.005, 0.1), len(uplinks)

    async def story(swarm: Swarm, peers: list[Unlike]) -> None:
        if seed % 2:
            await epochs_of(peers, 2)
        for peer, uplink in zip(peers, uplinks, strict=True):
            swarm.network.set_bandwidths(peer.node.peer_id, uplink=uplink or 10e6, downlink=10e6)
        computed = [peer.computed for peer in peers]
        quick = [peer for peer, uplink in zip(peers, uplinks, strict=True) if uplink is None]
        first, *others = await epochs_of(quick or peers, 3)
        if quick:
            # What a peer that turns slow costs: a third of a round's time where nobody knows its line, and two tries.
            assert first < 200 / sum(trainers[1:]) + 60 / 3 + 10, first
            assert max(others) < 200 / sum(trainers[1:]) + 5, others
            lost = ("not in the average", "samples of this peer are lost")  # where the round that it spoils dies
            assert any(each in text for text in peers[0].said for each in lost), peers[0].said
            if seed % 2 == 0:
                seat = peers[0].core.seat  # type: ignore[union-attr]
                await until(lambda: seat.lost is not None)
                (told,) = [text for text in peers[0].said if "samples cannot count" in text]
                assert "your line has been seen to need" in told and "`swarm validate RECIPE --uplink" in told
                swarm.network.set_bandwidths(peers[0].node.peer_id, uplink=10e6, downlink=10e6)
                await until(lambda: peers[0].said[-1] == "this computer's samples count again: it computes")
                assert seat.lost is None
        else:
            # Each sends its parts to the other reducers, and the averages of its own to the other members. Where all
            # lines turn slow at once, one member's line cannot carry its share until the lines are measured again.
            usual = 200 / sum(trainers) + 2 * (count - 1) / count * NBYTES / min(filter(None, uplinks))
            most = 900.0 if seed % 2 else 1.5 * usual
            assert first < most + 60 and max(others) < most, (first, others)
            assert all(peer.computed > before for peer, before in zip(peers, computed, strict=True))
        await until(lambda: len({peer.epoch for peer in peers}) == 1)
        assert len({peer.core.position for peer in peers}) == 1

    tell(story, [("trainer", pace) for pace in trainers], elements=NBYTES // 4, latency=latency, bandwidth=10e6)


def test_an_auxiliary_with_a_limit_that_a_round_would_outlast_reduces_nothing() -> None:
    async def story(swarm: Swarm, peers: list[Unlike]) -> None:
        *trainers, helper = peers
        usual = (await epochs_of(trainers, 3))[-1]
        helper.limit(5e3, None)
        took = await epochs_of(trainers, 3)
        assert max(took) < usual + 2, took  # what it says comes late all the same

    tell(story, [("trainer", 50.0), ("trainer", 60.0), ("auxiliary", 0.0)], elements=100_000)


def test_a_helper_that_costs_every_round_its_time_stays_away_from_more_and_more_of_them() -> None:
    """Its line is slow, and nothing that it says of itself tells that."""

    async def story(swarm: Swarm, peers: list[Unlike]) -> None:
        *trainers, helper = peers
        usual = (await epochs_of(trainers, 3))[-1]
        swarm.network.set_bandwidths(helper.node.peer_id, uplink=5e3, downlink=None)
        took = await epochs_of(trainers, 5)
        held_up = [round(seconds, 1) for seconds in took if seconds > usual + 1.5]
        assert 0 < len(held_up) <= 3, took  # in the first, and after 1 and 2

    tell(story, [("trainer", 50.0), ("trainer", 60.0), ("auxiliary", 0.0)], elements=100_000)


@pytest.mark.soak
def test_the_samples_of_a_trainer_that_was_killed_turn_nobody_against_the_leader() -> None:
    """The reports count them for a minute longer, so to the others the epoch seems over and their leader idle."""

    async def story(swarm: Swarm, peers: list[Unlike]) -> None:
        *others, guest = peers
        await epochs_of(peers, 1)
        await until(lambda: isinstance(guest.core, OptimizerCore) and guest.core.work.samples >= 120)
        swarm.network.kill(guest.node.peer_id)
        guest.ends = True
        took = await epochs_of(others, 1)
        usual = 200 / 2
        assert max(took) < usual + 20, took

    tell(story, [("monitor", 0.0), ("trainer", 1.0), ("trainer", 1.0), ("trainer", 4.0)], elements=100_000)
