"""Staying in the network: missing first contacts, doubtful and lost contacts, and unknown parts.

Because every node now and then tries its first contacts and those that it lost, two halves of a network that could
not see each other merge again once they can.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from swarmcli.dht.core import CALL_TIMEOUT, NodeCore
from swarmcli.dht.lookup import gather_answers
from swarmcli.dht.records import ID_BITS, node_id
from swarmcli.dht.routing import BUCKET_SIZE, MOST_LOST, Change, Contact
from swarmcli.errors import DHTError, NetworkError, OwnAddressError
from swarmcli.events import Event, PeerDisconnected
from swarmcli.network.addresses import Scope
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time, set_within

PROBES = 4  # lost contacts that are tried at a time
# Seconds
PROBE_INTERVAL = 20.0  # between attempts to find lost contacts again …
PROBE_PAUSE = 1.0  # … and at the least
REFRESH_INTERVAL = 60.0  # between looks into a part of the network not heard of


class Maintenance:
    """Looks after the routing table, by steps that are taken again and again (`TaskOwner.keep`)."""

    def __init__(self, core: NodeCore) -> None:
        self._core = core
        self.first_contacts: dict[str, PeerID | None] = {}  # tried again whenever the peer is not in the table
        self._first_contacts_due = float("-inf")  # loop time
        self._to_ping: dict[PeerID, None] = {}
        self._somebody_to_ping = asyncio.Event()
        self._somebody_lost = asyncio.Event()

    def on_event(self, event: Event) -> None:
        """A neighbour whose connection has ended is pinged at once: if it is dead, its records need another replica."""
        if isinstance(event, PeerDisconnected):
            own = node_id(self._core.peer_id)
            for contact in self._core.contacts.table.nearest(own, BUCKET_SIZE):
                if contact.peer_id.text == event.peer:
                    self._ping_soon(contact.peer_id)

    def contact_changed(self, change: Change, contact: Contact) -> None:
        if change == "lost":
            self._somebody_lost.set()
        elif change == "doubtful":
            self._ping_soon(contact.peer_id)

    async def keep_pinging(self) -> None:
        await self._somebody_to_ping.wait()
        self._somebody_to_ping.clear()
        peers, self._to_ping = list(self._to_ping), {}
        await self._ping(peers)

    async def keep_probing(self) -> None:
        await self._probe()
        await asyncio.sleep(PROBE_PAUSE)
        until_due = max(0.0, self._core.contacts.next_probe() - loop_time())
        pause = min(until_due, self._core.jittered(PROBE_INTERVAL))
        if await set_within(self._somebody_lost, pause):
            self._somebody_lost.clear()

    async def keep_exploring(self) -> None:
        """Looks now and then into a part of the network of which this node knows few others (Kademlia, section 2.3)."""
        random = self._core.endpoint.random
        table = self._core.contacts.table
        while True:
            await asyncio.sleep(self._core.jittered(REFRESH_INTERVAL))
            if thin := table.thin_buckets():
                # The far end holds half of all nodes and the next bucket half of the rest, so look there first.
                index = thin[-1 - min(len(thin) - 1, int(random.expovariate(0.5)))]
                await self._core.explore(table.id_in_bucket(index, random.getrandbits(ID_BITS)))

    def _ping_soon(self, peer: PeerID) -> None:
        if len(self._to_ping) < MOST_LOST:
            self._to_ping[peer] = None
            self._somebody_to_ping.set()

    async def _ping(self, peers: Sequence[PeerID]) -> list[Contact]:
        """Those that answered; the others have left the table."""
        answers = await gather_answers([self._core.ping(peer) for peer in peers], (NetworkError, DHTError))
        return [contact for contact in answers if contact is not None]

    async def _probe(self) -> None:
        """Tries lost contacts and missing first contacts: one that is back knows others that were lost with it."""
        core = self._core
        lost = core.contacts.lost_contacts(loop_time(), PROBES)
        for contact in lost:
            core.endpoint.learn(contact.peer_id, contact.addresses, horizon=Scope.HOST)  # it named these itself
        found = await self._ping([contact.peer_id for contact in lost])
        if loop_time() >= self._first_contacts_due:
            self._first_contacts_due = loop_time() + self._core.jittered(PROBE_INTERVAL)
            found += await self._ping(await self._missing_first_contacts())
        if found:
            await core.explore(node_id(core.peer_id))

    async def _missing_first_contacts(self) -> list[PeerID]:
        """Those of the first contacts that can be dialed but are not in the table."""
        own, table = self._core.peer_id, self._core.contacts.table
        missing = [
            address
            for address, peer in self.first_contacts.items()
            if peer != own and (peer is None or peer not in table)
        ]
        found = await gather_answers([self._dial(address) for address in missing], (NetworkError,))
        self.first_contacts.update(zip(missing, found, strict=True))
        return [peer for peer in found if peer is not None and peer != own]

    async def _dial(self, address: str) -> PeerID:
        try:
            return await self._core.endpoint.connect(address, timeout=CALL_TIMEOUT)
        except OwnAddressError:
            return self._core.peer_id
