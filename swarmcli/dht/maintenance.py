"""Finding the network, and staying in it: first contacts, doubtful and lost contacts, and unknown parts.

Because every node now and then tries its first contacts and those that it lost, two halves of a network that could
not see each other merge again once they can.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from swarmcli.dht.core import NodeCore
from swarmcli.dht.lookup import gather_answers
from swarmcli.dht.records import ID_BITS, node_id
from swarmcli.dht.routing import Change, Contact
from swarmcli.errors import (
    BootstrapError,
    CallTimeout,
    DHTError,
    NetworkError,
    NotAMember,
    OwnAddressError,
    SwarmError,
    WrongPeerError,
)
from swarmcli.events import Event, Noticed, PeerDisconnected
from swarmcli.network.addresses import Scope, parse_address
from swarmcli.network.identity import PeerID

_FIRST_PAUSE = 0.1  # seconds between two attempts at one first contact; it doubles
_LONGEST_PAUSE = 1.0
_PROBES = 4  # lost contacts tried at a time
_BREATHER = 1.0  # seconds between two rounds of probes, at the least


async def find_first_contact(core: NodeCore, addresses: Sequence[str], timeout: float) -> dict[str, PeerID | None]:
    """Tries all addresses side by side and again until one answers; returns whom each led to (None: nobody yet).

    Raises AddressError for an address that cannot be read, and BootstrapError, with what failed last at each
    address, when none has answered after `timeout` seconds. A node whose only first contact is itself is alone,
    which is no error. The first failure at each peer's last address is an event of the endpoint: the wait may be long.
    """
    found: dict[str, PeerID | None] = {address: parse_address(address).peer_id for address in addresses}
    others = [address for address, peer in found.items() if peer != core.peer_id]
    failures: dict[str, SwarmError] = {}
    deadline = core.loop_time() + timeout

    async def keep_trying(address: str) -> bool:
        """Whether it answered. Returns False only where every further try would end in the same way."""
        pause = _FIRST_PAUSE
        while True:
            try:
                peer = found[address] = await core.endpoint.connect(address, timeout=core.limits.call_timeout)
                await core.ping(peer)
                return True
            except OwnAddressError as error:
                failures[address] = error
                found[address] = core.peer_id
                return all(peer == core.peer_id for peer in found.values())  # the only first contact there is
            except (WrongPeerError, NotAMember) as error:
                failures[address] = error
                return False
            except SwarmError as error:
                if address not in failures and _last_to_fail(address, others, failures):
                    what = str(error).removeprefix(f"{address}: ") or type(error).__name__
                    left = round(deadline - core.loop_time(), 1)
                    text = f"{address} does not answer yet: {what}; trying again for {left:g} s"
                    core.endpoint.events.emit(Noticed("info", text))
                failures[address] = error
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    answered = not others
    async with asyncio.TaskGroup() as group:
        waiting = {group.create_task(keep_trying(address)) for address in others}
        try:
            async with asyncio.timeout_at(deadline):
                while waiting and not answered:
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    answered = any(task.result() for task in done)
        except TimeoutError:
            pass
        for task in waiting:
            task.cancel()
    if answered:
        return found
    attempts = {address: failures.get(address, CallTimeout("no answer yet")) for address in others}
    lines = [str(error) or type(error).__name__ for error in attempts.values()]
    named = [line if each in line else f"{each}: {line}" for each, line in zip(attempts, lines, strict=True)]
    within = f" within {timeout:g} s" if waiting else ""
    raise BootstrapError(f"no first contact answered{within}: {'; '.join(named)}", attempts)


def _last_to_fail(address: str, others: Sequence[str], failures: Mapping[str, SwarmError]) -> bool:
    """Whether no other address of the peer that it names is left: links name all addresses of a peer, and some lead
    nowhere from here."""
    named = parse_address(address).peer_id
    same = [each for each in others if each != address and parse_address(each).peer_id == named]
    return named is None or all(each in failures for each in same)


class Maintenance:
    """Looks after the routing table; `run` works until it is cancelled."""

    def __init__(self, core: NodeCore) -> None:
        self._core = core
        self.first_contacts: dict[str, PeerID | None] = {}  # tried again whenever the peer is not in the table
        self._first_contacts_due = float("-inf")  # loop time
        self._to_ping: dict[PeerID, None] = {}
        self._somebody_to_ping = asyncio.Event()
        self._somebody_lost = asyncio.Event()

    def on_event(self, event: Event) -> None:
        """A neighbour whose connection is gone is asked at once: if it is dead, its records want a new home."""
        if isinstance(event, PeerDisconnected):
            own = node_id(self._core.peer_id)
            for contact in self._core.contacts.table.nearest(own, self._core.bucket_size):
                if contact.peer_id.text == event.peer:
                    self._ping_soon(contact.peer_id)

    def contact_changed(self, change: Change, contact: Contact) -> None:
        if change == "lost":
            self._somebody_lost.set()
        elif change == "doubtful":
            self._ping_soon(contact.peer_id)

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
            pause = min(until_due, self._core.jittered(self._core.limits.probe_interval))
            try:
                async with asyncio.timeout(pause):
                    await self._somebody_lost.wait()
            except TimeoutError:
                continue
            self._somebody_lost.clear()

    async def _keep_exploring(self) -> None:
        """Looks now and then into a part of the network that this node knows few of (Kademlia, section 2.3)."""
        random = self._core.endpoint.random
        table = self._core.contacts.table
        while True:
            await asyncio.sleep(self._core.jittered(self._core.limits.refresh_interval))
            if thin := table.thin_buckets():
                # The far end holds half of all nodes and the next bucket half of the rest, so look there first.
                index = thin[-1 - min(len(thin) - 1, int(random.expovariate(0.5)))]
                await self._core.explore(table.id_in_bucket(index, random.getrandbits(ID_BITS)))

    def _ping_soon(self, peer: PeerID) -> None:
        if len(self._to_ping) < self._core.limits.max_evicted:
            self._to_ping[peer] = None
            self._somebody_to_ping.set()

    async def _ping(self, peers: Sequence[PeerID]) -> list[Contact]:
        """Those that answered; the others have left the table."""
        answers = await gather_answers([self._core.ping(peer) for peer in peers], (NetworkError, DHTError))
        return [contact for contact in answers if contact is not None]

    async def _probe(self) -> None:
        """Tries lost contacts and missing first contacts: one that is back knows others that were lost with it."""
        core = self._core
        lost = core.contacts.lost_contacts(core.loop_time(), _PROBES)
        for contact in lost:
            core.endpoint.learn(contact.peer_id, contact.addresses, horizon=Scope.HOST)  # its own word, in its time
        found = await self._ping([contact.peer_id for contact in lost])
        if core.loop_time() >= self._first_contacts_due:
            self._first_contacts_due = core.loop_time() + self._core.jittered(core.limits.probe_interval)
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
            return await self._core.endpoint.connect(address, timeout=self._core.limits.call_timeout)
        except OwnAddressError:
            return self._core.peer_id
