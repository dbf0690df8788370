"""Looking after the routing table: pinging the doubtful, finding lost contacts again, exploring what is unknown.

Because every node now and then tries its first contacts and those that it lost, two halves of a network that could
not see each other merge again once they can.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from swarmcli.dht.client import DHTClient
from swarmcli.dht.core import NodeCore
from swarmcli.dht.lookup import gather_answers
from swarmcli.dht.records import ID_BITS, node_id
from swarmcli.dht.routing import Contact
from swarmcli.dht.writing import Writer
from swarmcli.errors import DHTError, NetworkError, OwnAddressError
from swarmcli.events import Event, PeerDisconnected
from swarmcli.network.addresses import PeerInfo
from swarmcli.network.identity import PeerID

_PROBES = 4  # lost contacts tried at a time
_JITTER = 0.25
_BREATHER = 1.0  # seconds between two rounds of probes, at the least


class Maintenance:
    """`run` works until it is cancelled."""

    def __init__(self, core: NodeCore, client: DHTClient, writer: Writer) -> None:
        self._core = core
        self._client = client
        self._writer = writer
        self._first_contacts: dict[str, PeerID | None] = {}
        self._first_contacts_due = float("-inf")  # loop time
        self._to_ping: dict[PeerID, None] = {}
        self._somebody_to_ping = asyncio.Event()
        self._somebody_lost = asyncio.Event()

    def remember(self, first_contacts: dict[str, PeerID | None]) -> None:
        """Addresses to try again whenever the peer behind them (None: not met yet) is not in the table."""
        self._first_contacts.update(first_contacts)

    def on_event(self, event: Event) -> None:
        """A neighbour whose connection is gone is asked at once: if it is dead, its records want a new home."""
        if isinstance(event, PeerDisconnected):
            own = node_id(self._core.endpoint.peer_id)
            for contact in self._core.contacts.table.nearest(own, self._core.options.bucket_size):
                if contact.peer_id.text == event.peer:
                    self._ping_soon(contact.peer_id)

    def contact_lost(self, contact: Contact) -> None:
        self._somebody_lost.set()

    def contact_doubtful(self, contact: Contact) -> None:
        """It has not been heard of for long, and a newcomer waits for its place."""
        self._ping_soon(contact.peer_id)

    async def explore(self, target: int) -> None:
        """A search of full width: everyone near the target hears of this node, and this node of them."""
        await self._writer.search([target], self._core.options.bucket_size)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_pinging())
            group.create_task(self._keep_probing())
            group.create_task(self._keep_exploring())

    async def _keep_pinging(self) -> None:
        while True:
            await self._somebody_to_ping.wait()
            self._somebody_to_ping.clear()
            peers, self._to_ping = list(self._to_ping), {}
            await self._ping(peers)

    async def _keep_probing(self) -> None:
        while True:
            await self._probe()
            await asyncio.sleep(_BREATHER)
            until_due = max(0.0, self._core.contacts.next_probe() - self._core.loop_time())
            pause = min(until_due, self._jittered(self._core.limits.probe_interval))
            try:
                async with asyncio.timeout(pause):
                    await self._somebody_lost.wait()
            except TimeoutError:
                continue
            self._somebody_lost.clear()

    async def _keep_exploring(self) -> None:
        """Looks now and then into a part of the network that this node knows few of (Kademlia, section 2.3)."""
        random = self._core.endpoint.random
        while True:
            await asyncio.sleep(self._jittered(self._core.limits.refresh_interval))
            thin = self._core.contacts.table.thin_buckets()
            if thin:
                # The far end holds half of all nodes and the next bucket half of the rest, so look there first.
                index = thin[-1 - min(len(thin) - 1, int(random.expovariate(0.5)))]
                await self.explore(self._core.contacts.table.id_in_bucket(index, random.getrandbits(ID_BITS)))

    def _ping_soon(self, peer: PeerID) -> None:
        if len(self._to_ping) < self._core.limits.max_evicted:
            self._to_ping[peer] = None
            self._somebody_to_ping.set()

    async def _ping(self, peers: Sequence[PeerID]) -> list[Contact]:
        """Those that answered; the others have left the table."""
        answers = await gather_answers([self._client.ping(peer) for peer in peers], (NetworkError, DHTError))
        return [contact for contact in answers if contact is not None]

    async def _probe(self) -> None:
        """Whoever of the lost is there again knows others that were lost with it."""
        lost = self._core.contacts.lost_contacts(self._core.loop_time(), _PROBES)
        for contact in lost:
            self._core.endpoint.learn(PeerInfo(contact.peer_id, contact.addresses))
        found = await self._ping([contact.peer_id for contact in lost])
        if self._core.loop_time() >= self._first_contacts_due:
            self._first_contacts_due = self._core.loop_time() + self._jittered(self._core.limits.probe_interval)
            found += await self._ping(await self._missing_first_contacts())
        if found:
            await self.explore(node_id(self._core.endpoint.peer_id))

    async def _missing_first_contacts(self) -> list[PeerID]:
        """Those of the first contacts that can be dialed but are not in the table."""
        own = self._core.endpoint.peer_id
        missing = [
            address
            for address, peer in self._first_contacts.items()
            if peer != own and (peer is None or peer not in self._core.contacts.table)
        ]
        found = await gather_answers([self._dial(address) for address in missing], (NetworkError,))
        self._first_contacts.update(zip(missing, found, strict=True))
        return [peer for peer in found if peer is not None and peer != own]

    async def _dial(self, address: str) -> PeerID:
        try:
            return await self._core.endpoint.connect(address, timeout=self._core.limits.call_timeout)
        except OwnAddressError:
            return self._core.endpoint.peer_id

    def _jittered(self, seconds: float) -> float:
        return seconds * (1 + _JITTER * self._core.endpoint.random.random())
