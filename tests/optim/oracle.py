"""What a swarm's parameters have to be, computed anew from what its peers say they put in; and how long it took."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swarmcli.events import EpochAdvanced, EpochCredited
from tests.optim.optim_swarm import Swarm, Trainer, decay, digests, momentum, reference

TIGHT = {"rtol": 1e-10, "atol": 1e-12}


@dataclass(frozen=True)
class Link:
    """How a lineage came about."""

    before: str
    samples: int
    credited: Mapping[str, float]  # contributor → samples, as far as the group let them count


class Watched:
    """One trainer from its start: its first lineage, and when it came to each epoch."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.first = self.begins = trainer.core.position.lineage.hex()  # the latter is that of a loaded checkpoint
        self.moments: list[tuple[float, EpochAdvanced]] = []
        self.credited: dict[str, Mapping[str, float]] = {}  # by lineage
        trainer.node.endpoint.events.subscribe(self._note)

    def _note(self, event: object) -> None:
        if isinstance(event, EpochAdvanced):
            self.moments.append((asyncio.get_running_loop().time(), event))
        elif isinstance(event, EpochCredited) and self.moments and self.moments[-1][1].epoch == event.epoch:
            self.credited[self.moments[-1][1].lineage] = event.samples  # not of a round that it replays

    def links(self) -> dict[str, Link]:
        """The rounds that it took part in, by lineage; one that it replayed or downloaded tells nothing of lineages."""
        found, before = {}, self.begins
        for _, event in self.moments:
            if event.samples:
                found[event.lineage] = Link(before, event.samples, self.credited.get(event.lineage, {}))
            before = event.lineage
        return found

    def gaps(self, since: float, until: float) -> list[float]:
        """Seconds from epoch to epoch, of those that ended in this time."""
        times = [moment for moment, _ in self.moments]
        return [b - a for a, b in itertools.pairwise(times) if since <= b <= until]


class Oracle:
    """Watches every trainer of a swarm. Make it before they are started."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.watched: dict[Trainer, Watched] = {}

    async def trainer(self, **options: Any) -> Trainer:
        trainer = await self.swarm.trainer(**options)
        self.watched[trainer] = Watched(trainer)
        return trainer

    async def load(self, trainer: Trainer, checkpoint: Checkpoint) -> None:
        await checkpoint.load(trainer)
        self.watched[trainer].begins = trainer.core.position.lineage.hex()

    def chain(self, trainer: Trainer) -> tuple[str, list[tuple[str, Link]]]:
        """From the first lineage to where this trainer stands."""
        links = {lineage: link for each in self.watched.values() for lineage, link in each.links().items()}
        lineage, chain = trainer.core.position.lineage.hex(), []
        while lineage in links:
            chain.append((lineage, links[lineage]))
            lineage = links[lineage].before
        return lineage, chain[::-1]

    def check(
        self, trainers: Iterable[Trainer], make: Callable[..., Any] = momentum, scheduler: Callable[..., Any] = decay
    ) -> None:
        """They hold bit-identical parameters, which are what one process makes of the batches of their lineage: of
        nobody's gradients but those of the peers that were on it, each exactly once."""
        together = list(trainers)
        assert len(digests(together)) == 1
        assert len({trainer.core.position for trainer in together}) == 1
        first, chain = self.chain(together[0])
        assert len(chain) == together[0].epoch, "the history is complete"
        batches = [self._batch(lineage, link) for lineage, link in chain]
        seed = next(watched.trainer.seed for watched in self.watched.values() if watched.first == first)
        expected = reference(seed, batches, make, scheduler)
        torch.testing.assert_close(together[0].weights.detach(), expected, **TIGHT)

    def _batch(self, lineage: str, link: Link) -> torch.Tensor:
        """Rows whose mean loss is the round's: of four and more peers nobody's count for more than a share, and each
        row of a peer is scaled, since the loss grows with its square, so that all count as the group let them."""
        given = {t.node.peer_id.text: t.given[lineage] for t in self.watched if lineage in t.given}
        rows = sum(map(len, given.values()))
        if rows == link.samples:
            return torch.cat(list(given.values()))
        assert given.keys() == link.credited.keys() and math.isclose(
            sum(link.credited.values()), link.samples, abs_tol=1
        )
        assert all(link.credited[peer] <= len(own) for peer, own in given.items())
        all_counted = sum(link.credited.values())
        counts = {peer: link.credited[peer] / len(own) for peer, own in given.items()}
        return torch.cat([own * math.sqrt(counts[peer] * rows / all_counted) for peer, own in given.items()])

    def usual(self, trainers: Sequence[Trainer], since: float, until: float) -> float:
        """Seconds that an epoch takes, in the middle."""
        return statistics.median(gap for trainer in trainers for gap in self.watched[trainer].gaps(since, until))

    def gaps_begun(self, trainer: Trainer, since: float) -> list[float]:
        """Seconds from epoch to epoch, of those that began since then."""
        times = [moment for moment, _ in self.watched[trainer].moments if moment > since]
        return [b - a for a, b in itertools.pairwise(times)]

    def contributed(self, trainer: Trainer, since: float) -> bool:
        """Whether its gradients were in an average since then."""
        return any(moment > since and event.own_samples for moment, event in self.watched[trainer].moments)

    def longest(self, trainers: Sequence[Trainer], since: float, until: float) -> float:
        return max(gap for trainer in trainers for gap in self.watched[trainer].gaps(since, until))


class Work:
    """Trainers that train beside the test, each until an epoch."""

    def __init__(self) -> None:
        self._tasks: dict[Trainer, asyncio.Task[None]] = {}
        self._until: dict[Trainer, int] = {}

    async def __aenter__(self) -> Work:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.wait(self._tasks.values())

    def begin(self, *trainers: Trainer, until: int = 10**6, gate: asyncio.Event | None = None) -> None:
        """A trainer behind a gate computes only while that is open."""
        for trainer in trainers:
            self._until[trainer] = until
            self._tasks[trainer] = asyncio.ensure_future(self._train(trainer, gate))

    async def stop(self, trainer: Trainer) -> None:
        """It takes no further step."""
        self._until[trainer] = 0
        await self._tasks[trainer]

    async def all_until(self, epoch: int) -> None:
        """All go on until this epoch."""
        self._until = dict.fromkeys(self._tasks, epoch)
        await self.done()

    async def done(self) -> None:
        await asyncio.gather(*self._tasks.values())

    async def _train(self, trainer: Trainer, gate: asyncio.Event | None) -> None:
        while trainer.epoch < self._until[trainer]:
            if gate is not None:
                await gate.wait()
            await trainer.compute()


@dataclass(eq=False)
class Checkpoint:
    """What a trainer left behind: its state_dict and the parameters of that moment."""

    epoch: int
    state: dict[str, Any]
    weights: torch.Tensor

    @classmethod
    async def of(cls, trainer: Trainer) -> Checkpoint:
        state = await trainer.core.state_dict()
        return cls(trainer.epoch, state, trainer.weights.detach().clone())

    async def load(self, trainer: Trainer) -> None:
        with torch.no_grad():
            trainer.weights.copy_(self.weights)
        await trainer.core.load_state_dict(self.state)
