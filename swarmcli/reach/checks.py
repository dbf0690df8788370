"""Checks: up to three contacts in unlike networks are asked to dial this peer back (`dialback.py` answers at the other
end). A nonce that comes in at the listener proves that this peer can be dialed; one that does not come is a silence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import chain

from swarmcli.errors import NetworkError
from swarmcli.network.addresses import Scope, scope_of
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time, set_within
from swarmcli.reach.dialback import DIAL_BACK, NONCE_BYTES, DialBackReply, DialBackRequest, plain_host, with_port
from swarmcli.reach.evidence import Evidence
from swarmcli.reach.verdict import AskedContact, Family, family_of, host_of

logger = logging.getLogger(__name__)

NETWORKS = 3  # unlike networks that are asked before a verdict is at rest
CANDIDATES = 16  # contacts that one check tries at most, if many refuse
# Seconds for a dial-back before its silence counts; a nonce that comes later still counts.
PATIENCE = 2.0
_LEAST_PATIENCE = 1.0  # with contacts nearby: machines are busy when they start
_CALL = 2.0  # seconds for the contact's yes; the dial comes after it


@dataclass(slots=True)
class _Ask:
    """One nonce, and what came of it."""

    nonce: bytes
    port: int  # of this peer, at which it is to be dialed
    network: str  # of the contact …
    scope: Scope = Scope.HOST  # … and from how far away it sees this peer
    address: str = ""  # that the contact dials; "": it has not said yes
    refused: bool = False
    proved: bool = False
    over: bool = False  # its time has passed


class Checks:
    """Owns the nonces of the last two checks of each family, so that one bad moment does not lose a verdict."""

    def __init__(self, endpoint: Endpoint, evidence: Evidence, news: Callable[[], None]) -> None:
        """`news` is called whenever something has come that may change a verdict."""
        self.running = False
        self._endpoint, self._evidence, self._news = endpoint, evidence, news
        self._last: dict[Family, list[list[_Ask]]] = {}  # the newest check last
        self._stirred = asyncio.Event()
        self._ended = set[Family]()  # families in which a check has ended

    def asked(self, family: Family) -> list[AskedContact]:
        """Contacts that said yes and whose time has passed, or that proved something; of one network a proof counts
        before a silence."""
        asks = [ask for ask in chain.from_iterable(self._last.get(family, ())) if ask.address]
        words = {ask.network: ask for ask in asks if ask.over} | {ask.network: ask for ask in asks if ask.proved}
        return [AskedContact(ask.network, ask.address, ask.proved) for ask in words.values()]

    def was_made(self, family: Family) -> bool:
        return bool(self.asked(family))

    def unanswered(self, family: Family) -> bool:
        """Whether the last check found nobody who would dial this peer, and no earlier one tells anything."""
        return family in self._ended and not self.was_made(family)

    def in_vain(self, family: Family) -> bool:
        """Whether the last check brought no proof."""
        checks = self._last.get(family, [])
        return bool(checks) and not any(ask.proved for ask in checks[-1])

    def stir(self) -> None:
        """A contact was met: a check under way may ask it."""
        self._stirred.set()

    def forget(self, left: Iterable[Family]) -> None:
        """This peer has moved: what was dialed before is no address of it any more."""
        for family in left:
            self._last.pop(family, None)
            self._ended.discard(family)

    def heard(self, peer: PeerID, remote_address: str, nonce: bytes) -> None:
        """A probe with a nonce came in at the listener. It proves something only if it comes from at least as far away
        as the contact that was asked: a peer in this one's own network can dial it anyway."""
        checks, host = chain.from_iterable(self._last.values()), host_of(remote_address)
        ask = next((ask for ask in chain.from_iterable(checks) if ask.nonce == nonce), None)
        if ask is None:
            return
        if self._evidence.around.is_near(host) or _scope(host) < ask.scope:
            logger.debug("a probe from %s at %s proves nothing", peer.short, remote_address)
            return
        ask.proved = True
        self._stirred.set()
        self._news()

    async def run(self) -> None:
        """Checks each family, side by side."""
        self.running = True
        try:
            async with asyncio.TaskGroup() as group:
                for family in self._evidence.families():
                    group.create_task(self._check(family))
        finally:
            self.running = False

    async def _check(self, family: Family) -> None:
        """Asks contacts in unlike networks, those included that are met meanwhile, until no further answer could change
        the verdict or their time has passed."""
        begun, port = loop_time(), self._evidence.port(family)
        checks, asks, asked = self._last.setdefault(family, []), list[_Ask](), set[PeerID]()
        checks.append(asks)
        async with asyncio.TaskGroup() as group:
            calls: list[asyncio.Task[None]] = []
            while True:
                standing = {ask.network: ask for ask in asks if not ask.refused}
                for contact, network in self._evidence.candidates(family, asked, 4 * CANDIDATES):
                    if len(standing) < NETWORKS and network not in standing and len(asked) < CANDIDATES:
                        ask = standing[network] = _Ask(self._endpoint.random.randbytes(NONCE_BYTES), port, network)
                        asks.append(ask)
                        asked.add(contact)
                        calls.append(group.create_task(self._ask(family, contact, ask)))
                proofs = sum(ask.proved and ask.address != "" for ask in standing.values())
                left = begun + self._patience(asked) - loop_time()
                # 1 ms is less than a tick of some loops' clocks: a shorter wait would never end.
                if (proofs and 2 * proofs >= len(standing)) or left <= 1e-3:
                    break  # no further answer could change the verdict, or the time has passed
                self._stirred.clear()
                await set_within(self._stirred, left)
            for call in calls:
                call.cancel()
        for ask in asks:
            ask.over = True
        if self._last.get(family) is not checks:
            return  # this peer has moved meanwhile
        self._ended.add(family)
        if not any(ask.address for ask in asks):
            checks.remove(asks)
            return
        # Checks of another port say nothing about this one.
        self._last[family] = [each for each in checks if each and each[0].port == port][-2:]
        self._news()  # at once: in another family there may be nobody to ask

    async def _ask(self, family: Family, contact: PeerID, ask: _Ask) -> None:
        """Sends a nonce to a contact, and notes where it dials."""
        seen, named, host = self._endpoint.seen(contact), "", ""
        try:
            if seen is None or seen.relayed or family_of(host := host_of(seen.remote_address)) != family:
                host, named = await self._seen_in(family, contact, ask.port)
            ask.scope = _scope(host)
            request = DialBackRequest(ask.nonce, ask.port, named)
            reply = await self._endpoint.call(contact, DIAL_BACK, request, DialBackReply, timeout=_CALL)
            # The contact's word alone. The words of several are compared; at a false address others do not find this
            # peer, and drop it.
            if family_of(plain_host(reply.address)) == family:
                ask.address = with_port(reply.address, ask.port)
        except NetworkError as error:
            logger.debug("%s does not dial this peer: %s", contact.short, error)
        ask.refused = not ask.address
        self._stirred.set()

    async def _seen_in(self, family: Family, contact: PeerID, port: int) -> tuple[str, str]:
        """A host of a contact in this family, which is not that of its connection, and the address at which it sees
        this peer there. Raises NetworkError."""
        for address in self._endpoint.addresses_of(contact):
            if family_of(host := plain_host(address)) == family:
                observed = await self._endpoint.probe(address, contact, timeout=_CALL)
                if observed is not None:
                    return host, with_port(observed, port)
        raise NetworkError(f"it is not seen in {family}")

    def _patience(self, asked: Collection[PeerID]) -> float:
        """Seconds for a dial-back: call, connection and greetings are five round trips, estimated by the longest one to
        the contacts."""
        known = [self._endpoint.round_trip(peer) for peer in asked]
        longest = max((seconds for seconds in known if seconds is not None), default=PATIENCE)
        return min(PATIENCE, _LEAST_PATIENCE + 5 * longest)


def _scope(host: str) -> Scope:
    return scope_of(host) or Scope.HOST
