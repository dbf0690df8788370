"""Peers that have trained with each other before some of them begin to lie."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from swarmcli.averaging import RoundResult
from tests.adversary.lies import Liar
from tests.averaging.averagers import Peer, all_outcomes
from tests.optim.optim_swarm import TARGET, Swarm, Trainer, together

PACE = 0.5  # seconds that a sample takes


def liar_of(peer: Peer | Trainer) -> Liar:
    core = peer.core
    if isinstance(peer, Peer):
        return Liar(random.Random(0), peer.endpoint, peer.node, peer.core)
    return Liar(random.Random(0), peer.node.endpoint, peer.node, core.work.averager, core)


async def round_beside(honest: Sequence[Peer], *liars: Peer) -> list[RoundResult]:
    """What the honest make of their next round: nobody loses it, and all hold the same. The liars are left behind."""
    lied = [liar.begin(timeout=600) for liar in liars]
    outcomes = await all_outcomes([peer.begin(timeout=600) for peer in honest])
    for control in lied:
        control.cancel()
    await asyncio.gather(*lied, return_exceptions=True)
    results = [outcome for outcome in outcomes if isinstance(outcome, RoundResult)]
    assert len(results) == len(honest), outcomes
    assert len({tuple(peer.values) for peer in honest}) == 1
    return results


@asynccontextmanager
async def trained(
    count: int, epochs: int = 1, *, pace: float = PACE, home: str = ""
) -> AsyncIterator[tuple[Swarm, list[Trainer]]]:
    """So many trainers, which have ended these epochs together."""
    async with Swarm(3, home=home) as swarm:
        trainers = [await swarm.trainer(seed=1, batch_size=1, pace=pace) for _ in range(count)]
        await together(*(trainer.core.join() for trainer in trainers))
        await together(*(trainer.train(epochs) for trainer in trainers))
        yield swarm, trainers


async def go_on(epochs: float, trainers: Sequence[Trainer], *beside: Coroutine[Any, Any, Any]) -> None:
    """For the time that so many epochs take where all of these compute and nobody waits. What is `beside` ends then."""
    working = [asyncio.create_task(trainer.train(10_000)) for trainer in trainers]
    tasks = [*working, *map(asyncio.create_task, beside)]
    await asyncio.sleep(epochs * TARGET * trainers[0].pace / len(trainers))
    ended = [task for task in tasks if task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert not ended, ended


def lineages(trainers: Sequence[Trainer]) -> set[bytes]:
    return {trainer.core.position.lineage for trainer in trainers}
