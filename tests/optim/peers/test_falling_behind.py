"""Who comes late, was frozen, or returns with an old state is in step soon, holds up nobody, and mixes nothing in."""

import asyncio

import pytest

from swarmcli.events import RoundsReplayed, StateDownloaded
from tests.optim.optim_swarm import Swarm, Trainer, record, until
from tests.optim.oracle import Oracle, Work
from tests.simulation import now, within
from tests.suites import soak


async def veterans(oracle: Oracle, count: int = 3, pace: float = 0.1) -> list[Trainer]:
    """Trainers of unlike pace."""
    return [await oracle.trainer(seed=1, pace=pace * (1 + 0.3 * number)) for number in range(count)]


class Arrivals:
    """The states that a trainer took over from here on, and the rounds that it replayed."""

    def __init__(self, trainer: Trainer) -> None:
        self.downloads = record(trainer.node, StateDownloaded)
        self.replays = record(trainer.node, RoundsReplayed)

    @property
    def last(self) -> int:
        """The epoch to which the last of them led, before the trainer's first contribution."""
        return max(event.epoch for event in [*self.downloads, *self.replays])


@pytest.mark.parametrize(("seed", "half"), [(0, 1), *soak([(0, 2), (1, 2), (2, 2)])])
@within(500)
async def test_two_halves_that_trained_apart(seed: int, half: int) -> None:
    async with Swarm(seed=seed) as swarm, Work() as work:
        oracle = Oracle(swarm)
        trainers = await veterans(oracle, 2 * half, pace=0.4)
        ids = [trainer.node.peer_id for trainer in trainers]
        work.begin(*trainers)
        await until(lambda: trainers[0].epoch == 2)
        swarm.network.partition([swarm.contact.peer_id, *ids[:half]], ids[half:])
        await until(lambda: min(trainer.epoch for trainer in trainers) >= 4)
        arrivals = [Arrivals(trainer) for trainer in trainers]
        swarm.network.heal()
        met = now()
        await until(lambda: len({trainer.core.position.lineage for trainer in trainers}) == 1)
        # Lost contacts are probed after pauses of 2, 4, 8 s and a quarter more at most; one may just have begun.
        assert now() - met < 12
        await work.all_until(max(trainer.epoch for trainer in trainers) + 2)
        oracle.check(trainers)
        # The faster half may overtake the other one before they meet: which of them leads then is left open.
        downloads = [len(each.downloads) for each in arrivals]
        assert sorted([downloads[:half], downloads[half:]]) == [[0] * half, [1] * half], (
            "one half goes on as before, the other downloads, once"
        )


@pytest.mark.parametrize(("pace", "own"), [(0.3, 0.25), *soak([(0.2, 0.35), (0.2, 0.15), (0.3, 0.35), (0.4, 0.15)])])
@within(100)
async def test_whoever_comes_while_epochs_take_ten_round_trips_is_in_a_group_soon(pace: float, own: float) -> None:
    """`own`: seconds for which the newcomer computes between two looks."""
    async with Swarm(latency=0.05) as swarm, Work() as work:
        there = [await swarm.trainer(seed=1, pace=pace) for _ in range(3)]
        work.begin(*there)
        await until(lambda: min(trainer.epoch for trainer in there) >= 4)
        late = await swarm.trainer(seed=1, pace=own)
        arrivals, begun = Arrivals(late), there[0].epoch
        work.begin(late)
        async with asyncio.timeout(15):
            await until(lambda: bool(late.used))
        assert len(arrivals.replays) <= 3
        waits = [ended.seconds for ended in there[0].epochs if ended.epoch > begun]
        assert sum(seconds > 1.6 for seconds in waits) <= 2, "they wait for it a second, twice at most"


@pytest.mark.parametrize(("seed", "count", "epochs"), [(0, 4, 2), *soak([(0, 10, 8), (1, 10, 8), (2, 10, 8)])])
@within(500)
async def test_many_that_start_within_one_epoch_do_not_fork(seed: int, count: int, epochs: int) -> None:
    """The first epoch is shorter than a step of some: whoever comes too late for its round replays it."""
    async with Swarm(seed=seed) as swarm, Work() as work:
        oracle = Oracle(swarm)
        trainers = [await oracle.trainer(seed=1, pace=0.5 + 0.15 * number) for number in range(count)]
        downloads = [record(trainer.node, StateDownloaded) for trainer in trainers]
        for trainer in trainers:
            work.begin(trainer, until=epochs)
            await asyncio.sleep(0.05)
        await work.done()
        oracle.check(trainers)
        assert not any(downloads)
        lineages = {(event.epoch, event.lineage) for trainer in trainers for event in trainer.epochs}
        assert len(lineages) == epochs, "one in each epoch"
