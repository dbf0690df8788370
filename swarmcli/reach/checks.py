"""Checks: contacts are asked to have this peer dialed back (`dialback.py` answers at the other end), and a nonce that
comes in at the listener proves that somebody could."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarmcli.errors import NetworkError
from swarmcli.network.addresses import Scope
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.wire.codec import encode
from swarmcli.reach.dialback import (
    DIAL_BACK,
    MAX_KNOWN,
    NONCE_BYTES,
    DialBackReply,
    DialBackRequest,
    DialWish,
    plain_host,
    scope_or_host,
    with_port,
)
from swarmcli.reach.evidence import CheckOptions, Evidence
from swarmcli.reach.verdict import AskedContact, Family, family_of, host_of, network_of
from swarmcli.recent import Recent

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pending:
    """A nonce that was sent to a contact."""

    network: str  # of the contact …
    scope: Scope  # … and from how far away it sees this peer
    asked_at: float
    address: str = ""  # that will be dialed
    proved: bool = False
    refused: bool = True  # until the contact has said yes


class Checks:
    """Owns the nonces: of each family those of its last check, which its verdict stands on."""

    def __init__(
        self,
        endpoint: Endpoint,
        evidence: Evidence,
        news: Callable[[], None],
        options: CheckOptions = CheckOptions(),
    ) -> None:
        """`news` is called whenever something has come that may turn a verdict."""
        self.running = False
        self._endpoint, self._evidence, self._news, self._options = endpoint, evidence, news, options
        self._pending: Recent[bytes, _Pending] = Recent(options.nonces)
        self._nonces: dict[Family, tuple[bytes, ...]] = {}
        self._stirred = asyncio.Event()

    def asks(self, family: Family) -> list[AskedContact]:
        """How those stand that were asked in the family's last check."""
        return self._asks(self._nonces.get(family, ()))

    def was_made(self, family: Family) -> bool:
        return family in self._nonces

    def stir(self) -> None:
        """Somebody was met: a check under way may ask it."""
        self._stirred.set()

    def forget(self, left: Iterable[Family]) -> None:
        """This peer has moved: what was dialed before is no address of it any more."""
        for family in left:
            self._nonces.pop(family, None)
        self._pending.clear()

    def heard(self, peer: PeerID, remote_address: str, nonce: bytes) -> None:
        """A probe with a nonce came in at the listener. It proves something if it was dialed from as far away as the
        contact is that was asked: a peer in the same home as this one can dial it anyway."""
        pending = self._pending.get(nonce)
        if pending is None or loop_time() - pending.asked_at > self._options.late:
            return
        host = host_of(remote_address)
        if self._evidence.around.is_near(host) or scope_or_host(host) < pending.scope:
            logger.debug("a probe from %s at %s proves nothing", peer.short, remote_address)
            return
        pending.proved, pending.refused = True, False  # a dial can be faster than the contact's yes
        self._stirred.set()
        self._news()

    async def run(self, known: Callable[[Family], bool | None]) -> None:
        """One round of dial-backs in each family, side by side. `known` says whether a family's verdict stands now that
        this peer can be dialed."""
        self.running = True
        try:
            async with asyncio.TaskGroup() as group:
                for family in self._evidence.families():
                    group.create_task(self._check(family, known))
        finally:
            self.running = False

    async def _check(self, family: Family, known: Callable[[Family], bool | None]) -> None:
        nonces, asked = await self._ask_around(family, {})
        before = known(family)  # the first verdict is not waited for twice as long
        if before is not None and nonces and not self._proves(family, nonces):
            # A verdict is not lost by one bad moment of three contacts: others are asked too, where there are some. And
            # they dial themselves: third peers may be liars, of whom somebody has sent one to each contact.
            left = before and self._evidence.candidates(family, asked)
            again, others = await self._ask_around(family, asked if left else {}, yourself=True)
            in_vain = not self._proves(family, again or nonces)
            if before and in_vain and self._too_few((*nonces, *again), asked | others):
                return
            nonces = again or nonces
        if nonces:
            self._nonces[family] = nonces
            self._news()  # nobody waits for another family in which there is perhaps nobody to ask

    def _proves(self, family: Family, nonces: Sequence[bytes]) -> bool:
        return bool(self._evidence.judge(family, self._asks(nonces)).dialable)

    def _too_few(self, nonces: Sequence[bytes], asked: Mapping[PeerID, str]) -> bool:
        """Whether the silence of those who said yes takes no proved verdict away, as at least as many networks had no
        dial to give: it may be one liar's, and one that waits for the others to be busy would be believed alone."""
        asks = self._asks(nonces)
        silent = {ask.network for ask in asks if not ask.proved}
        refused = set(asked.values()) - {ask.network for ask in asks}
        return len(silent) < self._options.networks and len(refused) >= len(silent)

    async def _ask_around(
        self, family: Family, avoid: Mapping[PeerID, str], *, yourself: bool = False
    ) -> tuple[tuple[bytes, ...], dict[PeerID, str]]:
        """Has this peer dialed back on behalf of up to three contacts in unlike networks, those too that are met
        meanwhile. Returns their nonces, as soon as they say enough or have had their time, and who was asked, each
        with its network."""
        begun, options = loop_time(), self._options
        under_way: dict[asyncio.Task[bytes | None], str] = {}
        taken: dict[str, bytes] = {}  # network → nonce
        asked: dict[PeerID, str] = {}
        try:
            while True:
                busy = set(taken) | set(under_way.values())
                for contact, network in self._evidence.candidates(family, {**asked, **avoid}):
                    if len(busy) < options.networks and network not in busy and len(asked) < options.candidates:
                        asked[contact] = network
                        busy.add(network)
                        under_way[asyncio.create_task(self.ask(contact, family, yourself=yourself))] = network
                deadline = begun + self._patience(asked)
                # Less than a tick of some loops' clocks before it is at it: a shorter wait would not get any further.
                if self._enough(taken.values(), len(under_way)) or loop_time() >= deadline - 1e-3:
                    return tuple(taken.values()), asked
                await self._something(under_way, deadline)
                for task in [task for task in under_way if task.done()]:
                    if (nonce := task.result()) is not None:
                        taken[under_way[task]] = nonce
                    del under_way[task]
        finally:
            for task in under_way:
                task.cancel()
            if under_way:
                await asyncio.wait(under_way)

    async def _something(self, tasks: Iterable[asyncio.Task[bytes | None]], deadline: float) -> None:
        """Returns when a contact has answered, a nonce has come, somebody was met, or the time is up; after a moment in
        any case, since nothing tells that a contact has said where else it can be asked."""
        self._stirred.clear()
        waiting = asyncio.ensure_future(self._stirred.wait())
        seconds = min(self._options.glance, max(0.0, deadline - loop_time()))
        try:
            await asyncio.wait({waiting, *tasks}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()

    def _patience(self, asked: Iterable[PeerID]) -> float:
        """The seconds for a dial-back: a call to a third peer, its connection and greetings are six round trips, of
        lengths that are guessed from those to the contacts."""
        most = self._options.patience
        known = [self._endpoint.round_trip(peer) for peer in asked]
        longest = max((seconds for seconds in known if seconds is not None), default=most)
        return min(most, self._options.shortest_patience + 6 * longest)

    def _enough(self, nonces: Iterable[bytes], unanswered: int) -> bool:
        """Whether no further answer of those who were asked could turn the verdict."""
        asks = self._asks(nonces)
        proofs = sum(ask.proved for ask in asks)
        return proofs > 0 and proofs >= len(asks) - proofs + unanswered

    def _asks(self, nonces: Iterable[bytes]) -> list[AskedContact]:
        """How these stand, without those that were refused and those of which nobody knows what was dialed."""
        nonces = [nonce for nonce in nonces if nonce in self._pending]
        for nonce in nonces:
            self._pending.move_to_end(nonce)  # a verdict stands on it, however many were sent since
        return [
            AskedContact(each.network, each.address, each.proved)
            for each in map(self._pending.__getitem__, nonces)
            if each.address and not each.refused
        ]

    async def ask(self, contact: PeerID, family: Family, *, yourself: bool) -> bytes | None:
        """Asks one contact; the nonce to look for, or None if it did not take it on."""
        nonce = self._endpoint.random.randbytes(NONCE_BYTES)
        known = tuple(self._endpoint.connected())[:MAX_KNOWN]
        request = DialBackRequest(nonce, self._evidence.port(family), known, yourself)
        seen = self._endpoint.seen(contact)
        if seen is not None and not seen.relayed and family_of(host_of(seen.remote_address)) == family:
            return await self._ask_by_call(contact, family, request, seen.remote_address, seen.observed_address)
        return await self._ask_by_probe(contact, family, request)

    async def _ask_by_call(
        self, contact: PeerID, family: Family, request: DialBackRequest, remote: str, observed: str | None
    ) -> bytes | None:
        pending = self._note(request, host_of(remote))
        if observed is not None:
            pending.address = with_port(observed, request.port)
        try:
            reply = await self._endpoint.call(contact, DIAL_BACK, request, DialBackReply, timeout=self._options.call)
        except NetworkError as error:
            logger.debug("%s does not have this peer dialed: %s", contact.short, error)
            return request.nonce if pending.proved and pending.address else None
        if observed is None and family_of(plain_host(reply.address)) == family:
            # It dialed this peer, so it alone knows where. Several such words are compared; a false one is an
            # address at which others do not find this peer, and drop.
            pending.address = with_port(reply.address, request.port)
        pending.refused = False
        return request.nonce if pending.address else None

    async def _ask_by_probe(self, contact: PeerID, family: Family, request: DialBackRequest) -> bytes | None:
        for address in self._endpoint.addresses_of(contact):
            if family_of(plain_host(address)) != family:
                continue
            pending = self._note(request, host_of(address))
            wish = encode(DialWish(request))
            try:
                observed = await self._endpoint.probe(address, contact, wish, timeout=self._options.call)
            except NetworkError as error:
                logger.debug("no probe of %s at %s: %s", contact.short, address, error)
                continue
            if observed is not None:
                pending.address, pending.refused = with_port(observed, request.port), False
                return request.nonce
        return None

    def _note(self, request: DialBackRequest, host: str) -> _Pending:
        pending = self._pending[request.nonce] = _Pending(network_of(host), scope_or_host(host), loop_time())
        return pending
