"""Keys that take the room of a group's list: by their number, or by what each of them brings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress

import pytest

from swarmcli.averaging.group import MAX_GATHERED_BYTES
from swarmcli.averaging.matchmaking.finder import GroupFinder
from swarmcli.averaging.matchmaking.messages import (
    SEARCH_BYTES,
    Answer,
    Begin,
    Candidate,
    Heartbeat,
    IncomingBegin,
    Join,
    Offer,
    Pulse,
    method_name,
)
from swarmcli.dht import DHTNode
from swarmcli.errors import NetworkError
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import Identity, PeerID
from swarmcli.testing.memory_network import MemoryNetwork
from tests.adversary.company import PACE, go_on, lineages, trained
from tests.simulation import simulated
from tests.suites import soak

MUCH = Offer(gathered=bytes(MAX_GATHERED_BYTES))


class Crowd:
    """Keys on one machine. Each asks whoever looks for a group, every other second, says that it is there, and takes no
    part in what follows. `offers`: what it brings, one after the other."""

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
        prefix = finders[0]._config.prefix
        for endpoint in self._endpoints:
            await endpoint.start()
            endpoint.serve(method_name(prefix, Heartbeat), Heartbeat, self._beat)
            endpoint.serve(method_name(prefix, Begin), IncomingBegin, self._begin)
            for node in victims:
                endpoint.learn(node.peer_id, node.endpoint.addresses)
        while True:
            for finder in finders:
                if finder.driver is not None:
                    await asyncio.gather(*(self._ask(endpoint, finder) for endpoint in self._endpoints))
            await asyncio.sleep(2.0)

    async def _ask(self, endpoint: Endpoint, finder: GroupFinder) -> None:
        for offer in self._offers:
            if finder.driver is None:
                return
            own = finder.driver.search.own
            me = Candidate(endpoint.peer_id, bytes(SEARCH_BYTES), own.candidate.tag, listening=False)
            with suppress(NetworkError):
                join = Join(me, offer, own.terms, 0.0, patience=60.0)
                answer = await endpoint.call(
                    finder._endpoint.peer_id, method_name(finder._config.prefix, Join), join, Answer, timeout=3.0
                )
                self.accepted += answer.verdict == "accepted"

    async def _beat(self, peer: PeerID, message: Heartbeat) -> Pulse:
        return Pulse(together=True)

    async def _begin(self, peer: PeerID, message: IncomingBegin) -> Pulse:
        return Pulse(together=False)

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
    async with trained(count, pace=PACE / 2) as (swarm, trainers):
        crowd = Crowd(swarm.network, keys, offers)
        finders = [trainer.core.work.averager.finder for trainer in trainers]
        newcomer = await swarm.trainer(seed=1, batch_size=1, pace=PACE / 2)

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
