"""Looking after the routing table: pinging the doubtful, finding lost contacts again, exploring what is unknown.

Because every node now and then tries its first contacts and those that it lost, two halves of a network that could
not see each other merge again once they can.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from swarmcli.dht.calls import Calls
from swarmcli.dht.core import NodeCore
from swarmcli.dht.keys import ID_BITS, node_id
from swarmcli.dht.routing import Contact
from swarmcli.dht.writing import Writer
from swarmcli.errors import DHTError, NetworkError
from swarmcli.events import Event, PeerDisconnected
from swarmcli.network.identity import PeerID
from swarmcli.network.transport import PeerInfo

_PROBES = 4  # lost contacts tried at a time
_JITTER = 0.25


class Maintenance:
    """`run` works until it is cancelled."""

    def __init__(self, core: NodeCore, calls: Calls, writer: Writer) -> None:
        self._core = core
        self._calls = calls
        self._writer = writer
        self._first_contacts: dict[str, PeerID | None] = {}
        self._suspects: dict[PeerID, Contact] = {}
        self._wake = asyncio.Event()

    def remember(self, first_contacts: dict[str, PeerID | None]) -> None:
        """Addresses to try again whenever the peer behind them (None: not met yet) is not in the table."""
        self._first_contacts.update(first_contacts)

    def on_event(self, event: Event) -> None:
        """A neighbour whose connection is gone is asked at once: if it is dead, its records want a new home."""
        if isinstance(event, PeerDisconnected):
            own = node_id(self._core.endpoint.peer_id)
            for contact in self._core.contacts.table.nearest(own, self._core.options.bucket_size):
                if contact.peer_id.text == event.peer:
                    self._suspects[contact.peer_id] = contact
                    self._wake.set()

    def contact_appeared(self, contact: Contact) -> None:
        """Nothing to do: it has just shown that it lives."""

    def contact_lost(self, contact: Contact) -> None:
        """A table that runs empty is no matter for later."""
        if len(self._core.contacts.table) < self._core.options.num_replicas:
            self._wake.set()

    async def explore(self, target: int) -> None:
        """A search of full width: everyone near the target hears of this node, and this node of them."""
        await self._writer.search([target], self._core.options.bucket_size)

    async def run(self) -> None:
        limits = self._core.limits
        next_refresh = self._core.loop_time() + self._jittered(limits.refresh_interval)
        while True:
            await self._ping([contact.peer_id for contact in self._take_suspects()])
            if not self._suspects:
                await self._probe()
            if self._core.loop_time() >= next_refresh:
                next_refresh = self._core.loop_time() + self._jittered(limits.refresh_interval)
                await self._refresh()
            await self._pause()

    def _take_suspects(self) -> list[Contact]:
        suspects = {**self._core.contacts.doubtful, **self._suspects}
        self._suspects = {}
        self._core.contacts.doubtful.clear()
        return list(suspects.values())

    async def _pause(self) -> None:
        self._wake.clear()
        if self._suspects:
            return
        try:
            async with asyncio.timeout(self._jittered(self._core.limits.probe_interval)):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _ping(self, peers: Sequence[PeerID]) -> list[Contact]:
        """Those that answered; the others have left the table."""
        answered: list[Contact] = []

        async def ping(peer: PeerID) -> None:
            try:
                contact = await self._calls.ping(peer)
            except (NetworkError, DHTError):
                return
            if contact is not None:
                answered.append(contact)

        async with asyncio.TaskGroup() as group:
            for peer in peers:
                group.create_task(ping(peer))
        return answered

    async def _probe(self) -> None:
        """Whoever of the lost is there again knows others that were lost with it."""
        lost = self._core.contacts.lost_contacts(self._core.loop_time(), _PROBES)
        for contact in lost:
            self._core.endpoint.learn(PeerInfo(contact.peer_id, contact.addresses))
        found = await self._ping([contact.peer_id for contact in lost])
        found += await self._ping(await self._missing_first_contacts())
        if found:
            await self.explore(node_id(self._core.endpoint.peer_id))

    async def _missing_first_contacts(self) -> list[PeerID]:
        found: list[PeerID] = []
        for address, peer in list(self._first_contacts.items()):
            if peer == self._core.endpoint.peer_id or (peer is not None and peer in self._core.contacts.table):
                continue
            try:
                known = await self._core.endpoint.connect(address, timeout=self._core.limits.call_timeout)
            except NetworkError:
                continue
            self._first_contacts[address] = known
            found.append(known)
        return found

    async def _refresh(self) -> None:
        """Looks into one part of the network that this node knows few of (Kademlia, section 2.3)."""
        thin = self._core.contacts.table.thin_buckets()
        if thin:
            # The far end holds half of all nodes and the next bucket half of the rest, so look there first.
            random = self._core.endpoint.random
            index = thin[-1 - min(len(thin) - 1, int(random.expovariate(0.5)))]
            await self.explore(self._core.contacts.table.id_in_bucket(index, random.getrandbits(ID_BITS)))

    def _jittered(self, seconds: float) -> float:
        return seconds * (1 + _JITTER * self._core.endpoint.random.random())
