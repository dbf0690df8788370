"""Peers come, leave, die, freeze and are cut off as a seed draws it: those who are left end bit-identical."""

import asyncio
import random
from collections import defaultdict
from contextlib import suppress

import pytest

from swarmcli.events import RoundsReplayed, StateDownloaded
from tests.optim.optim_swarm import Swarm, Trainer, digests
from tests.simulation import within
from tests.suites import soak


class Chaos:
    """A swarm, and what happens to it."""

    def __init__(self, swarm: Swarm, seed: int, epochs: int) -> None:
        self.swarm, self.epochs = swarm, epochs
        self.random = random.Random(seed)
        self.work: dict[Trainer, asyncio.Task[None]] = {}
        self.parted = False
        self.frozen = set[Trainer]()  # cut off like that, and its own work goes on
        self.changes: dict[Trainer, list[StateDownloaded | RoundsReplayed]] = {}  # of its state, that it has told

    def follow(self, trainer: Trainer) -> None:
        events = self.changes[trainer] = []
        told = (StateDownloaded, RoundsReplayed)
        trainer.node.endpoint.events.subscribe(lambda event: isinstance(event, told) and events.append(event))

    @property
    def forks(self) -> list[int]:
        """Epochs that peers have entered by unlike rounds, beside those of one that was frozen and went on alone."""
        entered = defaultdict[int, dict[str, set[Trainer]]](lambda: defaultdict(set))
        for trainer in self.changes:
            for ended in trainer.epochs:
                if ended.samples:
                    entered[ended.epoch][ended.lineage].add(trainer)
        rounds = {epoch: [who for who in by.values() if not who <= self.frozen] for epoch, by in entered.items()}
        return [epoch for epoch, each in rounds.items() if len(each) > 1]

    async def join(self) -> None:
        draw = self.random
        trainer = await self.swarm.trainer(
            seed=draw.choice([1, 1, 2]),
            batch_size=draw.randint(1, 8),
            pace=draw.uniform(0.15, 0.6),
            client_mode=len(self.work) > 1 and draw.random() < 0.3,
        )
        self.follow(trainer)
        self.work[trainer] = asyncio.ensure_future(trainer.train(self.epochs))

    async def lose(self, orderly: bool) -> None:
        if len(self.work) == 1:
            return
        trainer = self.random.choice(list(self.work))
        task = self.work.pop(trainer)
        if not orderly:
            self.swarm.network.kill(trainer.node.peer_id)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        if orderly:
            await trainer.core.shutdown()

    async def freeze(self) -> None:
        trainer = self.random.choice(list(self.work))
        peer = trainer.node.peer_id
        self.frozen.add(trainer)
        self.swarm.network.freeze(peer)
        await asyncio.sleep(self.random.uniform(0.5, 15))
        self.swarm.network.thaw(peer)

    async def part(self) -> None:
        self.parted = True
        self.swarm.network.partition([t.node.peer_id for t in self.work if self.random.random() < 0.5])
        await asyncio.sleep(self.random.uniform(0.5, 15))
        self.swarm.network.heal()

    async def happen(self) -> None:
        """A few things, one after the other."""
        for _ in range(self.random.randint(2, 5)):
            await asyncio.sleep(self.random.uniform(1, 6))
            await self.random.choice(
                [self.join, self.freeze, self.part, lambda: self.lose(orderly=True), lambda: self.lose(orderly=False)]
            )()


@pytest.mark.parametrize(("seed", "epochs"), [(5, 13), *soak((seed, 30) for seed in (*range(8), 9, 11, 12, 17))])
@within(600)
async def test_whatever_happens_the_survivors_are_bit_identical(seed: int, epochs: int) -> None:
    async with Swarm(seed=seed, latency=random.Random(seed).choice([0.002, 0.01, 0.05])) as swarm:
        chaos = Chaos(swarm, seed, epochs)
        for _ in range(chaos.random.randint(2, 4)):
            await chaos.join()
        monitor = await swarm.trainer(seed=1, role="monitor")
        chaos.follow(monitor)
        following = asyncio.ensure_future(monitor.follow(epochs))
        await chaos.happen()
        await asyncio.gather(*chaos.work.values(), following)
        survivors = [*chaos.work, monitor]
        assert len({trainer.core.position for trainer in survivors}) == 1
        assert len(digests(survivors)) == 1
        # Nobody is on another branch than before without a word: a position that was not stepped to is told.
        for trainer in survivors:
            held = {ended.lineage for ended in trainer.epochs if ended.samples}
            told = {change.lineage for change in chaos.changes[trainer]}
            assert {ended.lineage for ended in trainer.epochs} <= held | told
        assert chaos.parted or not chaos.forks, chaos.forks
        most = max(map(len, chaos.changes.values()))
        assert chaos.parted or most <= 6, f"a peer came back {most} times"
