"""How many epochs a run still ends while members lie about groups, rounds and samples, over real connections.

All peers are in one process, each at an address of the loopback interface in a network of its own; trainers wait
instead of computing, so that the machine has little to do. The liars of `tests/adversary` act from the second epoch on:
1 of 4, 2 of 8 and 5 of 16. A run of the same members without a lie goes on beside them. Printed is which part of its
epochs the honest members end; those on one lineage have to hold the same weights. All runs of one size go side by side.

    python -m benchmarks.attacks [EPOCHS]          each run has the time of so many epochs, 30 by default
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from collections.abc import Callable, Sequence

from swarmcli.clock import Clock
from swarmcli.dht import DHTNode
from swarmcli.events import Events
from swarmcli.network import Endpoint, Identity
from swarmcli.network.transports.tcp.transport import TCPTransport
from tests.adversary.leading import ALTERED, alter_entries, begin_two, give_up, stuff
from tests.adversary.lies import Liar
from tests.adversary.lies.base import hurry_to_the_front
from tests.adversary.test_progress import claim, keep_out, list_keys
from tests.adversary.test_reports import refuse
from tests.optim.optim_swarm import TARGET, Swarm, Trainer, together
from tests.relaying import Relaying

SIZES = ((4, 1, 3.0), (8, 2, 6.0), (16, 5, 12.0))  # members, liars of them, seconds that the samples of an epoch take
Lie = Callable[[Trainer, Sequence[Trainer]], Liar]


class RealSwarm(Swarm):
    """Peers of one run, each at 127.X.Y.1."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self._number = number

    async def node(self, *, client_mode: bool = False, relays: bool = False) -> DHTNode:
        transport = TCPTransport(Identity.generate(), host=f"127.{1 + self._number}.{len(self._nodes)}.1")
        endpoint = Endpoint(transport, events=Events(), clock=Clock())
        await endpoint.start()
        contacts = self.contact.endpoint.addresses if self.contact is not None else ()
        node = await DHTNode.create(endpoint, initial_peers=contacts)
        self._nodes.append(node)
        self.relaying[node.peer_id] = Relaying(node, takes_part=False)
        return node


def leader(tell: Callable[[Liar], None]) -> Lie:
    def lie(trainer: Trainer, honest: Sequence[Trainer]) -> Liar:
        liar = Liar(random.Random(0), trainer.node.endpoint, averager=trainer.core.work.averager)
        tell(liar)
        return liar

    return lie


def keys(liar: Liar) -> None:
    stuff(liar, [Identity.generate() for _ in range(6)])


ATTACKS: dict[str, Lie | None] = {
    "none": None,
    "a leader that lists keys, and votes for them": leader(keys),
    "a leader that enters trainers as auxiliaries": leader(lambda liar: alter_entries(liar, ALTERED["an auxiliary"])),
    "a leader that has looked since ever": leader(hurry_to_the_front),
    "a leader of two groups": leader(begin_two),
    "a leader that gives rounds up": leader(give_up),
    "a reducer that refuses": lambda trainer, honest: refuse(trainer.node, trainer.core.work.averager),
    "a reducer that keeps the others out": lambda trainer, honest: keep_out(trainer),
    "claims of all samples": lambda trainer, honest: claim(trainer),
    "claims of all samples, by a leader in haste": lambda trainer, honest: claim(trainer, leads=True),
    "a leader that lists keys with claims": lambda trainer, honest: list_keys(trainer),
}


async def epochs(number: int, lie: Lie | None, members: int, liars: int, epoch: float, seconds: float) -> int:
    """Returns how many epochs the honest members end within so many seconds. `epoch`: seconds that the samples of an
    epoch take."""
    async with RealSwarm(number) as swarm:
        pace = epoch * members / TARGET
        trainers = [await swarm.trainer(seed=1, batch_size=1, pace=pace) for _ in range(members)]
        await together(*(trainer.core.join() for trainer in trainers))
        await together(*(trainer.train(2) for trainer in trainers))
        hostile, honest = trainers[:liars], trainers[liars:]
        for trainer in hostile if lie is not None else ():
            lie(trainer, honest)
        tasks = [asyncio.create_task(trainer.train(1 << 20)) for trainer in trainers]
        before = min(trainer.epoch for trainer in honest)
        await asyncio.sleep(seconds)
        ended = min(trainer.epoch for trainer in honest) - before
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        held = {trainer.core.position.lineage: trainer.core.replica.state.digest() for trainer in honest}
        for trainer in honest:
            assert held[trainer.core.position.lineage] == trainer.core.replica.state.digest(), (
                "unlike weights on one lineage"
            )
        return ended


async def run(most: int) -> None:
    for members, liars, epoch in SIZES:
        each = ((number, lie, members, liars, epoch, most * epoch) for number, lie in enumerate(ATTACKS.values()))
        usual, *found = await asyncio.gather(*(epochs(*one) for one in each))
        print(f"\n{liars} of {members}: {usual} epochs in {most * epoch:g} s without a lie; under")
        for name, ended in zip(list(ATTACKS)[1:], found, strict=True):
            print(f"    {name:<50} {ended:4}   {ended / usual:.2f}", flush=True)


def main() -> None:
    logging.getLogger("swarmcli").setLevel(logging.CRITICAL)  # what these peers tell would fill the screen
    asyncio.run(run(int(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1].isdigit() else 30))


if __name__ == "__main__":
    main()
