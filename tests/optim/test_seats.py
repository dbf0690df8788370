"""A trainer whose line is too slow follows the run, is told so in figures, and holds nobody up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
import torch

from swarmcli.events import Noticed
from swarmcli.optim.run_seat import FIRST_RETRY
from tests.optim.optim_swarm import TARGET, Swarm, Trainer, digests, meanwhile, momentum, record, together, until
from tests.simulation import now, within
from tests.suites import soak

BALLAST = 250_000  # elements: a round sends a megabyte
SLOW = 10e3  # bytes per second


def heavy(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    ballast = torch.nn.Parameter(torch.zeros(BALLAST))
    ballast.grad = torch.zeros(BALLAST)
    return momentum([*params, ballast])


class Volunteer:
    """A trainer whose loop does what a role's does: it computes nothing while its samples cannot count."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.core = trainer, trainer.core
        self.computed = 0
        self.said = record(trainer.node, Noticed)

    async def run(self, last: int) -> None:
        await self.core.join()
        while self.core.position.epoch < last:
            if self.core.seat.lost:
                await self.trainer.wait()
            else:
                await self.trainer.compute()
                self.computed += self.trainer.batch_size


async def volunteers(swarm: Swarm, count: int, **options: object) -> list[Volunteer]:
    return [Volunteer(await swarm.trainer(make=heavy, dtype=torch.float32, **options)) for _ in range(count)]


@within(3600)
async def test_nobody_hears_that_samples_count_again_who_did_not_hear_that_they_do_not() -> None:
    async with Swarm() as swarm:
        first, second = await volunteers(swarm, 2)

        async def limit_and_lift() -> None:
            await until(lambda: first.core.position.epoch >= 2)
            first.trainer.node.endpoint.limit_rates(1e8, 1e8)
            await until(lambda: first.core.position.epoch >= 4)
            first.trainer.node.endpoint.limit_rates(None, None)

        await together(first.run(7), second.run(7), limit_and_lift())
        assert not first.core.seat.tries and not any("count again" in notice.text for notice in first.said)


@pytest.mark.parametrize("upload", [True, *soak([False])])
@within(3600)
async def test_a_peer_of_10_kilobytes_per_second_costs_the_others_nothing_but_its_samples(upload: bool) -> None:
    async with Swarm() as swarm:
        quick, slow = await volunteers(swarm, 2)
        limits = (SLOW, None) if upload else (None, SLOW)
        loop = asyncio.get_running_loop()

        async def limit() -> None:
            await until(lambda: quick.core.position.epoch >= 3)
            slow.trainer.node.endpoint.limit_rates(*limits)
            slow.core.seat.review_in_run()
            assert slow.core.seat.lost is not None
            before = slow.computed, quick.core.position.epoch, loop.time()
            await until(lambda: quick.core.position.epoch >= 6)
            assert slow.computed <= before[0] + slow.trainer.batch_size
            nodes = quick.trainer.node.core.contacts.table
            assert slow.trainer.node.peer_id not in nodes  # nor do others' records fill its line
            alone = 3 * 6 * 0.1  # three epochs of six batches
            assert loop.time() - before[2] < 1.25 * alone + 3.0
            slow.trainer.node.endpoint.limit_rates(None, None)

        await together(quick.run(10), slow.run(10), limit())
        assert slow.trainer.node.peer_id in quick.trainer.node.core.contacts.table
        assert len(digests([quick.trainer, slow.trainer])) == 1
        told = [notice.text for notice in slow.said if "samples" in notice.text]
        needs = "a round sends 1.0 MB; your limit of 10 kB/s needs 2 min, epochs take 1 s: your samples cannot"
        assert told[0].startswith(needs)
        assert ("follows the run" in told[0]) == upload  # with so little coming in it cannot even follow
        assert told[-1] == "this computer's samples count again: it computes"
        assert slow.trainer.epochs[-1].own_samples > 0


@within(3600)
async def test_where_nobody_has_seen_an_epoch_figures_go_by_what_the_others_say() -> None:
    """A trainer that never had a seat leaves the other alone: nobody reduces for anybody, so none is a witness."""
    async with Swarm() as swarm:
        quick, slow = await volunteers(swarm, 2)
        slow.trainer.node.endpoint.limit_rates(SLOW, None)
        told: list[float] = []

        async def look() -> None:
            for epoch in range(6, 8):
                await until(lambda epoch=epoch: quick.core.position.epoch >= epoch)
                assert slow.core.seat.lost is not None
                told.append(slow.core.seat.lost.reason.epoch)

        await together(quick.run(8), slow.run(8), look())
        assert all(0.3 < epoch < 1.5 for epoch in told), told  # six batches of 0.1 s


@pytest.mark.parametrize("killed", [False, *soak([True])])
@within(3600)
async def test_within_one_computer_no_limit_counts_whoever_is_lost_there(killed: bool) -> None:
    """What passes between its peers counts against no limit, and a peer that does not answer is still one of them."""
    async with Swarm(home="192.0.2.1") as swarm:
        first, second, limited = await volunteers(swarm, 3)
        monitor = await swarm.trainer(make=heavy, dtype=torch.float32, role="monitor")
        limited.trainer.node.endpoint.limit_rates(SLOW, None)
        working = [each.run(10_000) for each in (first, second, limited)]
        async with meanwhile(*working, monitor.follow(10_000)) as tasks:
            for number, lost in enumerate((first, second)):
                epoch = limited.core.position.epoch + 2
                await until(lambda epoch=epoch: limited.core.position.epoch >= epoch)
                tasks[number].cancel()
                if killed:
                    await swarm.kill(lost.trainer)
                else:
                    swarm.network.freeze(lost.trainer.node.peer_id)
                before = limited.computed
                await until(lambda epoch=epoch: limited.core.position.epoch >= epoch + 3)
                assert limited.computed - before > 3 * TARGET / 3
        assert not [notice.text for notice in limited.said if "cannot count" in notice.text]


@within(3600)
async def test_a_slow_trainer_goes_on_alone_as_soon_as_nobody_else_answers() -> None:
    """It holds nobody up. The last report of who was killed stays for a minute, but that one has no samples."""
    async with Swarm() as swarm:
        quick, slow = await volunteers(swarm, 2, pace=2.0)
        slow.trainer.node.endpoint.limit_rates(SLOW, None)
        async with meanwhile(*(each.run(10_000) for each in (quick, slow))):
            await until(lambda: quick.core.position.epoch >= 4)
            assert slow.core.seat.lost is not None
            await swarm.kill(quick.trainer)
            began = now()
            await until(lambda: slow.core.seat.lost is None)
            assert now() - began < 6.0  # half an epoch


@within(3600)
async def test_a_line_is_tried_again_in_time_however_often_its_peer_catches_up_meanwhile() -> None:
    """Catching up quickly shows that the line is not slow any more, or never was."""
    async with Swarm() as swarm:
        those = await volunteers(swarm, 3, pace=2.0)
        seat = those[0].core.seat
        async with meanwhile(*(each.run(10_000) for each in those)):
            await until(lambda: those[0].core.position.epoch >= 2)
            seat._finder.lines.own = 30.0  # as a round shows it that came to nothing
            seat.review_in_run()
            assert seat.lost is not None
            began = now()
            while seat.lost is not None and now() < began + 5 * FIRST_RETRY:
                await asyncio.sleep(5.0)
                seat.note_catching_up(1e8)
            assert now() - began < FIRST_RETRY + 15.0


@within(3600)
async def test_a_pause_that_ends_does_not_have_a_trainer_without_a_seat_say_that_it_computes() -> None:
    async with Swarm() as swarm:
        quick, slow = await volunteers(swarm, 2)

        async def pause() -> None:
            await until(lambda: quick.core.position.epoch >= 3)
            assert slow.core.tracker.local_progress.samples_per_second > 0
            slow.trainer.node.endpoint.limit_rates(SLOW, None)
            slow.core.seat.review_in_run()
            assert slow.core.seat.lost is not None
            slow.core.pause()
            slow.core.resume()
            assert slow.core.tracker.local_progress.samples_per_second == 0

        await together(quick.run(4), slow.run(4), pause())


@pytest.mark.parametrize(("count", "place"), [(2, 0), (2, 1), (3, 0)])  # of a pair the smaller id may be either's
@within(3600)
async def test_a_limit_that_is_lifted_leaves_no_memory_of_a_slow_line(count: int, place: int) -> None:
    async with Swarm() as swarm:
        those = await volunteers(swarm, count)
        slow, quick = those.pop(place), those[0]
        endpoint, seat = slow.trainer.node.endpoint, slow.core.seat

        async def limit() -> None:
            for seconds in (5.0, 0.5):
                last = quick.core.position.epoch
                await until(lambda last=last: quick.core.position.epoch >= last + 2 and slow.core.is_averaging)
                endpoint.limit_rates(SLOW, SLOW)
                seat.review_in_run()
                assert seat.lost is not None
                await asyncio.sleep(seconds)
                endpoint.limit_rates(None, None)
                seat.review_in_run()
                assert seat.lost is None

        await together(slow.run(15 * count), *(each.run(15 * count) for each in those), limit())
        said = [each.text for volunteer in (slow, *those) for each in volunteer.said]
        assert not [text for text in said if "your link has been seen" in text]
