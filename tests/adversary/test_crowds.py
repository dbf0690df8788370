"""Keys that take the room of a group's list: by their number, or by what each of them brings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import pytest

from swarmcli.averaging.find.finder import GroupFinder
from swarmcli.averaging.find.messages import SEARCH_BYTES, Answer, Candidate, Join, Offer, method_name
from swarmcli.averaging.find.seek import Search
from swarmcli.averaging.group import MAX_GATHERED_BYTES
from swarmcli.dht import DHTNode
from swarmcli.errors import CallTimeout, NetworkError
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import Identity
from swarmcli.testing.memory_network import MemoryNetwork
from tests.adversary.company import go_on, lineages, trained
from tests.simulation import simulated
from tests.suites import soak

MUCH = Offer(gathered=bytes(MAX_GATHERED_BYTES))


class Crowd:
    """Keys on one machine. Each is on the call of whoever looks for a group, and takes no part in what follows.
    `offers`: what it brings, one after the other."""

    def __init__(self, network: MemoryNetwork, size: int, offers: Sequence[Offer]) -> None:
        self.accepted = 0
        self._offers = offers
        self._endpoints = [
            Endpoint(network.transport(Identity.from_seed(f"stranger {n}".encode()), listening=False), client_mode=True)
            for n in range(size)
        ]

    async def join(self, finders: Iterable[GroupFinder], victims: Iterable[DHTNode]) -> None:
        """Never ends."""
        finders = list(finders)
        for endpoint in self._endpoints:
            await endpoint.start()
            for node in victims:
                endpoint.learn(node.peer_id, node.endpoint.addresses)
        async with asyncio.TaskGroup() as calls:
            while True:
                for finder in finders:
                    if finder.search is not None:
                        for endpoint in self._endpoints:
                            calls.create_task(self._ask(endpoint, finder, finder.search))
                await asyncio.sleep(2.0)

    async def _ask(self, endpoint: Endpoint, finder: GroupFinder, search: Search) -> None:
        """It says that it is there for as long as the leader takes it in, and asks anew with the next offer."""
        victim, own, prefix = finder._endpoint.peer_id, search.own, finder._config.prefix
        me = Candidate(endpoint.peer_id, bytes(SEARCH_BYTES), own.candidate.tag, listening=False)
        for offer in self._offers:
            join = Join(me, offer, own.terms, 0.0, patience=60.0)
            call = endpoint.call(victim, method_name(prefix, Join), join, Answer, timeout=1.9 / len(self._offers))
            try:
                await call
            except CallTimeout:
                self.accepted += 1
            except NetworkError:
                return

    async def close(self) -> None:
        for endpoint in self._endpoints:
            await endpoint.close()


@pytest.mark.parametrize(
    ("offers", "count", "keys"), [([Offer(), MUCH], 3, 36), *soak([([MUCH], 4, 64), ([Offer(), MUCH], 8, 128)])]
)
@simulated
async def test_keys_that_bring_much_keep_nobody_out_of_a_group(offers: list[Offer], count: int, keys: int) -> None:
    """Before, 33 of them made it full for whoever came after them. Those that came with little, and said then how much
    they bring, made its list so long that no message could carry it, and nobody ended an epoch any more."""
    async with trained(count, pace=1.0) as (swarm, trainers):
        crowd = Crowd(swarm.network, keys, offers)
        finders = [trainer.core.work.averager.finder for trainer in trainers]
        newcomer = await swarm.trainer(seed=1, batch_size=1, pace=1.0)

        async def come() -> None:
            await asyncio.sleep(2.0)
            assert crowd.accepted > 33
            await newcomer.core.join()
            await newcomer.train(1000)

        await go_on(3, trainers, crowd.join(finders, [trainer.node for trainer in trainers]), come())
        await crowd.close()
        assert all(trainer.epoch > 1 for trainer in swarm.trainers)
        assert all(trainer.used for trainer in swarm.trainers), "each one's samples were in an average"
        assert len(lineages(swarm.trainers)) == 1
