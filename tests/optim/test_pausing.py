"""Peers that pause: nobody waits for them, and nothing that was computed before is lost. A peer that returns while the
others begin a round may lose what it computes until it hears of that, and is told so."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from swarmcli.events import EpochAdvanced, Noticed, StateDownloaded
from swarmcli.optim.core import OptimizerCore
from swarmcli.optim.modes.base import StateOptions, Timing
from swarmcli.optim.modes.gradients import Mode
from swarmcli.optim.modes.low_rank import PowerEF, PowerSGD
from swarmcli.optim.modes.outer import LocalUpdates, Outer, OuterSteps
from tests.optim.optim_swarm import (
    FEATURES,
    TARGET,
    Swarm,
    Trainer,
    assist,
    auxiliary,
    digests,
    loss_of,
    meanwhile,
    record,
    together,
    until,
)
from tests.simulation import now, within
from tests.suites import soak

LOST = 10  # batches that one pause costs at most: as many as are computed in a second


class Volunteer:
    """A trainer whose loop obeys a pause, as that of a role does."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.core = trainer, trainer.core
        self.computed = self.returns = 0
        self.ends = False
        self.notices = record(trainer.node, Noticed)

    @property
    def told(self) -> str:
        return self.core.report().pause

    @property
    def lost(self) -> int:
        """Samples of which it was told that no round will count them."""
        told = (re.match(r"(\d+) samples of this peer are lost", event.text) for event in self.notices)
        return sum(int(each[1]) for each in told if each)

    @property
    def is_paused(self) -> bool:
        return self.told == "paused"

    async def run(self) -> None:
        await self.core.join()
        while not self.ends:
            if self.core.pausing.is_asked:
                await self.core.step(0)
            elif self.core.pausing.away:
                self.returns += 1
                await self.core.join()
            else:
                await self._compute()
        self.core.pause()
        while not self.core.has_handed_in:
            await self.core.step(0)

    async def _compute(self) -> None:
        trainer = self.trainer
        await asyncio.sleep(trainer.pace)
        batch = torch.randn(trainer.batch_size, FEATURES, dtype=torch.float64, generator=trainer.data)
        trainer.weights.grad = None
        loss_of(trainer.weights, batch).backward()
        self.computed += trainer.batch_size
        await self.core.step(trainer.batch_size)


@asynccontextmanager
async def volunteers(swarm: Swarm, count: int, **options: Any) -> AsyncIterator[list[Volunteer]]:
    """Trainers that compute while the block lasts. At its end all pause, and every sample has to be somewhere."""
    everyone = [Volunteer(await swarm.trainer(seed=1, **options)) for _ in range(count)]
    async with asyncio.TaskGroup() as tasks:
        for each in everyone:
            tasks.create_task(each.run())
        yield everyone
        for each in everyone:
            each.ends = True
    kept = sum(each.core.work.samples for each in everyone)
    lost = [(each.lost, LOST * each.returns * each.trainer.batch_size) for each in everyone]
    assert all(told <= most for told, most in lost), "a few batches after each pause, at most"
    assert sum(each.computed for each in everyone) == accepted(everyone) + kept + sum(told for told, _ in lost)


def rounds(everyone: list[Volunteer]) -> list[EpochAdvanced]:
    """How each trainer saw the rounds in which it took part."""
    return [event for each in everyone for event in each.trainer.epochs if event.samples]  # without downloads


def accepted(everyone: list[Volunteer]) -> int:
    """Samples that committed rounds took, however many of them counted: among four peers or more nobody's samples
    count for more than a share."""
    counted, handed_in = dict[str, int](), Counter[str]()
    for event in rounds(everyone):
        counted[event.lineage] = event.samples
        handed_in[event.lineage] += event.own_samples
    return sum(max(samples, handed_in[lineage]) for lineage, samples in counted.items())


async def come_to(everyone: list[Volunteer], epoch: int) -> None:
    await until(lambda: all(each.trainer.epoch >= epoch for each in everyone))


@within(300)
async def test_nobody_waits_for_a_trainer_that_pauses_and_it_comes_back_into_step() -> None:
    async with Swarm() as swarm, volunteers(swarm, 3) as (first, *others):
        await come_to([first, *others], 3)
        await until(lambda: first.core.work.samples > 0)
        first.core.pause()
        first.core.pause()
        assert first.told == "pausing" and first.core.report().samples_per_second == 0
        await until(lambda: first.is_paused)
        assert first.core.work.samples == 0 and first.core.has_handed_in
        epoch, began = first.trainer.epoch, now()
        await come_to(others, epoch + 5)
        assert now() - began < 5 * 0.4, "0.3 s each, of computing alone"
        assert first.trainer.epoch == epoch
        first.core.resume()
        await come_to([first, *others], epoch + 7)
        assert first.told == ""


@within(3000)
async def test_who_pauses_takes_part_in_the_round_at_the_end_of_a_long_epoch_and_is_not_expected_to_compute() -> None:
    """It does as a peer does that is about to leave."""
    async with Swarm() as swarm, volunteers(swarm, 2, pace=20.0, target=40) as (first, second):
        await until(lambda: first.core.work.samples > 0)
        began = now()
        first.core.pause()
        await asyncio.sleep(30.0)
        expected, told = first.core.tracker.seconds_to_round, second.core.tracker
        assert expected == pytest.approx(told.global_progress.eta_next_epoch - told._clock.now(), abs=10)
        while not first.core.has_handed_in:
            assert first.told == "pausing" and first.core.work.samples > 0
            await asyncio.sleep(20.0)
        assert 120 < now() - began == pytest.approx(30 + expected, abs=40)
        assert first.core.work.samples == 0 and first.trainer.epochs[-1].own_samples > 0
        assert first.trainer.epochs[-1].peers == 2


@within(300)
async def test_who_leaves_before_it_has_read_a_report_hands_in_what_it_has_to_those_it_was_in_a_round_with() -> None:
    async with Swarm() as swarm, volunteers(swarm, 2) as (first, second):
        await come_to([first, second], 2)
        await until(lambda: first.core.work.samples > 0)
        first.core.directory.others.clear()
        first.core.pause(leaving=True)
        assert first.core.work.samples and not first.core.has_handed_in
        await until(lambda: first.core.has_handed_in)
        assert first.core.work.samples == 0


MODES: dict[str, Mode] = {
    "delayed step": Mode(timing=Timing.DELAYED_STEP),
    "delayed averaging": Mode(timing=Timing.DELAYED_AVERAGING),
    "outer steps": OuterSteps(outer=Outer(4), timing=Timing.DELAYED_AVERAGING),
    "PowerSGD": PowerSGD(averager_rank=1),
    "PowerEF": PowerEF(averager_rank=1),
    "local updates": LocalUpdates(),
    "local updates, averaged at once": LocalUpdates(state=StateOptions(delay=False)),
}


@pytest.mark.e2e
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@within(60)
async def test_a_pause_in_each_mode_costs_no_sample(mode: Mode) -> None:
    async with Swarm() as swarm, volunteers(swarm, 3, mode=mode) as everyone:
        await come_to(everyone, 2)
        for each in everyone:
            each.core.pause()
            await until(lambda: each.is_paused)  # noqa: B023
            await asyncio.sleep(2.0)
            each.core.resume()
            await until(lambda: each.told == "")  # noqa: B023
        await come_to(everyone, everyone[0].trainer.epoch + 3)


@pytest.mark.parametrize("seed", soak(range(21)))
@within(600)
async def test_whoever_comes_and_goes_all_the_time_neither_parts_the_run_nor_loses_a_sample(seed: int) -> None:
    """Each of five trainers pauses or resumes about every second; an epoch takes a third of that."""

    async def toggle(core: OptimizerCore, drawn: random.Random) -> None:
        for _ in range(20):
            await asyncio.sleep(drawn.expovariate(1.0))
            (core.resume if core.pausing.is_asked else core.pause)()
        core.resume()

    async with Swarm(seed) as swarm, volunteers(swarm, 5, target=2 * TARGET) as everyone:
        await come_to(everyone, 2)
        drawn = (random.Random(100 * seed + number) for number in range(5))
        await together(*(toggle(each.core, own) for each, own in zip(everyone, drawn, strict=True)))
        await come_to(everyone, max(each.trainer.epoch for each in everyone) + 2)
        await until(lambda: len(digests(each.trainer for each in everyone)) == 1)
    made = rounds(everyone)
    assert len({event.lineage for event in made}) == len({event.epoch for event in made})


@within(10000)
async def test_after_days_the_state_is_downloaded_from_those_who_went_on() -> None:
    async with Swarm() as swarm, volunteers(swarm, 3, pace=1.0) as (first, *others):
        await come_to([first, *others], 1)
        for each in (first, *others[1:]):  # of those with whom it trained one alone went on
            each.core.pause()
            await until(lambda: each.is_paused)  # noqa: B023
        downloads = record(first.trainer.node, StateDownloaded)
        epoch = others[0].trainer.epoch
        await until(lambda: others[0].trainer.epoch > epoch + 5)
        first.core.resume()
        await until(lambda: first.told == "")
        assert first.trainer.epoch >= epoch + 5
        assert len(downloads) == 1
        assert downloads[0].donors == (others[0].trainer.node.peer_id.text,), "not those who pause"


@within(300)
async def test_a_pause_during_a_download_ends_it_and_it_begins_anew_behind_the_pause() -> None:
    size = {"extra_tensors": [torch.zeros(800_000, dtype=torch.bool)], "pace": 0.5}
    async with Swarm() as swarm, volunteers(swarm, 2, **size) as everyone:
        await come_to(everyone, 2)
        late = Volunteer(await swarm.trainer(seed=2, **size))
        downloads, others = record(late.trainer.node, StateDownloaded), list(everyone)
        swarm.network.set_bandwidths(late.trainer.node.peer_id, uplink=None, downlink=1e5)  # 8 s for the state
        everyone.append(late)  # what it computes is somewhere, too
        running = asyncio.create_task(late.run())
        await asyncio.sleep(4.0)
        began = now()
        late.core.pause()
        await until(lambda: late.is_paused)
        assert now() - began < 3.0 and not downloads and late.trainer.epoch == 0
        await come_to(others, others[0].trainer.epoch + 3)
        assert not downloads
        swarm.network.set_bandwidths(late.trainer.node.peer_id, uplink=None, downlink=None)
        late.core.resume()
        await until(lambda: late.told == "")
        await come_to(everyone, others[0].trainer.epoch + 2)
        assert len(downloads) == 1 and late.computed
        late.ends = True
        await running


@within(300)
async def test_the_last_holder_of_a_state_hands_it_out_while_it_pauses() -> None:
    async with Swarm() as swarm, volunteers(swarm, 1) as (alone,):
        await come_to([alone], 2)
        alone.core.pause()
        await until(lambda: alone.core.has_handed_in)
        late = await swarm.trainer(seed=2)
        await late.core.join()
        assert late.epoch == alone.trainer.epoch
        late.core.pause()  # it never computes, and who leaves would stay for the round that it promises


@within(300)
async def test_monitors_and_auxiliaries_pause_as_well() -> None:
    async with Swarm() as swarm:
        monitor = Volunteer(await swarm.trainer(seed=1, role="monitor"))
        helper = await auxiliary(swarm)
        async with volunteers(swarm, 2) as everyone, meanwhile(monitor.trainer.follow(10**6), assist(helper)):
            await come_to([monitor, *everyone], 2)
            await until(lambda: helper.position.epoch >= 2)
            for core in (monitor.core, helper):
                core.pause()
            await until(lambda: monitor.is_paused and helper.report().pause == "paused")
            epoch = monitor.trainer.epoch
            await come_to(everyone, epoch + 2)
            assert monitor.trainer.epoch == epoch and helper.position.epoch <= epoch + 1
            for core in (monitor.core, helper):
                core.resume()
            await until(lambda: monitor.trainer.epoch > epoch + 2 and helper.position.epoch > epoch + 2)
            assert monitor.told == "" and helper.report().pause == ""


@within(300)
async def test_a_pause_right_behind_a_download_leaves_no_sums_of_the_former_parameters() -> None:
    async with Swarm() as swarm:
        late = await swarm.trainer(seed=3)
        await late.compute()
        first, second = [await swarm.trainer(seed=seed, batch_size=24) for seed in (1, 2)]
        await together(first.train(5), second.train(5))
        download = late.core.exchange.download
        assert late.core.work.samples

        async def then_pause(*arguments: Any, **options: Any) -> None:
            await download(*arguments, **options)
            late.core.pause()
            await asyncio.Event().wait()

        late.core.exchange.download = then_pause  # type: ignore[method-assign]
        while not late.core.pausing.is_asked:
            await late.wait()
        assert late.epoch >= 5
        assert not late.core.work.samples, "they are of parameters that are gone"
