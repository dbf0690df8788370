"""Reach: a peer finds out whether others can dial it, and if not, helps itself.

One task looks at the interfaces, runs the checks when they are due (`checks.py`), and concludes from all that was seen
(`evidence.py`). The verdicts decide what the endpoint announces, and thereby whether this peer is in client mode.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from swarmcli import events
from swarmcli.network.addresses import Scope, scope_of
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time, set_within
from swarmcli.network.task_owner import TaskOwner
from swarmcli.reach.checks import NETWORKS, Checks
from swarmcli.reach.dialback import DialBackService
from swarmcli.reach.evidence import Evidence
from swarmcli.reach.mapping import PortMapping
from swarmcli.reach.punch import Puncher
from swarmcli.reach.rates import RateService
from swarmcli.reach.relays import Relays
from swarmcli.reach.verdict import ContactSighting, Family, ReachVerdict, Surroundings, family_of, host_of, in_words

logger = logging.getLogger(__name__)

# In seconds.
FIRST_VERDICT = 3.0  # that a peer with contacts beyond its network waits at its start for the first verdict
REST = 600.0  # between two checks of a verdict at rest
_EARLY = 15.0, 60.0, 240.0  # between the first checks, while too few networks could be asked
_SOONEST = 10.0  # between two checks, whatever happens …
_DOUBTED = 120.0  # … and if a contact merely says that this peer is elsewhere: any stranger may say so for ever
_AFTER_A_FAULT = 60.0  # from a check that ended in a fault of our own to the next one
_LOOK = 5.0  # between two looks at the interfaces: laptops change their network
_RECONNECTED = 2.0  # after a wake-up, when contacts should be connected again


class Reach:
    """The keeper of one endpoint's reachability. `start` it on the loop, once the endpoint listens."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        contacts: Callable[[], Iterable[PeerID]] = tuple,
        alone: bool = True,
        mapping: Callable[[int], PortMapping] | None = None,
        relays: Relays | None = None,
    ) -> None:
        """`contacts`: further peers that can be asked, whose addresses are known. `alone`: there are no first contacts
        to wait for before this peer announces where it can be dialed. `mapping(port)` makes a mapping for the listener;
        None: no router is asked for a port. `relays` are held while nobody can dial this peer; None: it takes none."""
        self.endpoint = endpoint
        self.verdicts: tuple[ReachVerdict, ...] = ()
        self.checks = 0  # rounds of dial-backs so far
        self.evidence = Evidence(endpoint, contacts)
        self.punch = Puncher(endpoint, around=lambda: self.evidence.around)
        self.mapping: PortMapping | None = None  # that the router was asked for
        self._joined = alone  # whether the first contacts have been met
        self._wish = False  # the user wants nobody to dial this peer: the endpoint does not even listen
        self._make_mapping, self._relays = mapping, relays
        self._service = DialBackService(endpoint)
        self._checks = Checks(endpoint, self.evidence, self._news)
        self._rates = RateService(endpoint)
        self._checked_at = float("-inf")  # loop time
        self._check_due = float("inf")
        self._event = asyncio.Event()  # something happened that the keeper should look at
        self._settled = asyncio.Event()
        self._tasks = TaskOwner()
        self._said = ""

    # Life

    async def start(self) -> None:
        """Begins to look. If there is nobody to ask, the first verdict is there at once."""
        self._wish = self.endpoint.never_listens
        await self.evidence.begin()
        self._service.start()
        self._rates.start()
        self.endpoint.probes.heard = self._checks.heard
        self._tasks.hear(self.endpoint.events, self._on_event)
        if self._joined:
            self._conclude()
        elif not self._wish:
            self.endpoint.announce(direct=())  # until the first verdict
        await self.punch.start()
        if self._wish and self._relays is not None:
            await self._relays.start()
        self._tasks.keep(self.endpoint.events, self._keep)

    async def settle(self, timeout: float) -> bool:
        """Waits for the first verdict, at most `timeout` seconds. Returns whether it is there.

        The first contacts have been met by now. If they are on this machine or in its network, or if there are none,
        the verdict is there already.
        """
        self._joined = True
        self._conclude()
        return await set_within(self._settled, timeout)

    async def close(self) -> None:
        """Ends everything, and gives back what routers and relays were asked for. Idempotent."""
        self.endpoint.probes.heard = None
        await self._tasks.close()
        await self._service.close()
        self._rates.close()
        await self.punch.close()
        if self._relays is not None:
            await self._relays.close()
        mapping, self.mapping, self.evidence.mapped = self.mapping, None, None
        if mapping is not None:
            await mapping.withdraw()

    # Knowledge

    @property
    def dialable(self) -> bool | None:
        """Whether others can dial this peer; None: that is not known yet."""
        if any(verdict.dialable for verdict in self.verdicts):
            return True
        unknown = not self.verdicts or any(verdict.dialable is None for verdict in self.verdicts)
        return None if unknown and not self._settled.is_set() else False

    @property
    def scope(self) -> Scope:
        """From how far away this peer can be dialed; if it cannot, how far away those are that cannot dial it."""
        able = [verdict.scope for verdict in self.verdicts if verdict.dialable]
        return max(able or [verdict.scope for verdict in self.verdicts] or [Scope.HOST])

    def sentence(self) -> str:
        """Says in one sentence how this peer takes part."""
        relays = len(self.endpoint.addresses) - len(self.endpoint.direct_addresses)
        return in_words(self.verdicts, self.dialable, wished=self._wish, relays=relays)

    # Events

    def _on_event(self, event: events.Event) -> None:
        match event:
            case events.PeerConnected(peer):
                self._met(PeerID.parse(peer))
            case events.WokeUp():
                # Meanwhile the router may have forgotten a port, or this machine may be somewhere else.
                if self.mapping is not None:
                    self.mapping.refresh()
                if self.verdicts and self.evidence.beyond:
                    self._checked_at = loop_time() - _SOONEST + _RECONNECTED
                    self._check_soon()
                self._event.set()
            case events.OwnAddressesChanged():
                self._say()  # relays have been found, or lost

    def _met(self, peer: PeerID) -> None:
        sighting = self.evidence.meet(peer)
        if sighting is None:
            return
        self._conclude()
        if sighting in self.evidence.beyond:
            self._consider_check(sighting)

    def _consider_check(self, sighting: ContactSighting) -> None:
        """A contact from beyond this peer's network is there. That is a reason to check if nobody was asked yet, if it
        dialed this peer at an address that this peer does not know, or if it sees this peer at another host than the
        announced ones."""
        self._event.set()
        self._checks.stir()
        if self._checks.running:
            return
        family, observed = family_of(sighting.host), sighting.observed
        verdict = self._verdict(family)
        if verdict is None or not verdict.dialable or (verdict.how == "assumed" and verdict.scope is Scope.INTERNET):
            due = not self._checks.was_made(family)
        elif scope_of(host_of(verdict.address)) is Scope.LAN:
            due = verdict.how != "assumed"
        else:
            due = False
            if observed is not None and observed not in map(host_of, verdict.addresses):
                self._check_soon(self._checked_at + _DOUBTED)
        if due:
            self._check_soon()
        elif self._check_due == float("inf"):
            self._check_due = loop_time() + REST

    def _check_soon(self, after: float = float("-inf")) -> None:
        due = max(loop_time(), self._checked_at + _SOONEST, after)
        self._check_due = min(self._check_due, due)
        self._event.set()

    def _news(self) -> None:
        """A nonce has come, or a check is over: the verdict may change."""
        self._event.set()
        self._conclude()

    def _verdict(self, family: Family) -> ReachVerdict | None:
        return next((verdict for verdict in self.verdicts if verdict.family == family), None)

    # Keeping

    async def _keep(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(min(self._check_due, loop_time() + _LOOK)):
                await self._event.wait()
        self._event.clear()
        if self._wish:
            return
        self._look_again()
        if loop_time() >= self._check_due:
            try:
                await self._check()
                await self._help()
            except Exception:
                self._check_due = min(self._check_due, loop_time() + _AFTER_A_FAULT)
                raise

    def _look_again(self) -> None:
        """Notices that this machine has moved to another network: then nothing that was known of the old one holds.

        When containers, tunnels or further addresses come or go, nothing is forgotten.
        """
        before = self.evidence.look_again()
        if before is None:
            return
        gone, now = set(before.addresses), set(self.evidence.around.addresses)
        if gone - now:
            logger.info("this machine has other addresses now: %s", ", ".join(self.evidence.around.addresses))
            self._forget({family_of(host_of(address)) for address in gone - now}, before)
        if now - gone and self.evidence.beyond:
            self._check_soon()
        self._conclude()

    def _forget(self, left: set[Family], before: Surroundings) -> None:
        """Forgets what was found out in the families in which an address is gone, and takes in again where peers that
        are still connected see this one."""
        was_beyond = bool(before.those_beyond(self.evidence.sightings))
        self._checked_at = float("-inf")  # the next check waits for nothing but contacts
        self._checks.forget(left)
        self.evidence.forget(left)
        self.punch.forget()
        if self.mapping is not None:
            self.mapping.refresh()
        dropped = self.endpoint.leave_network(self.evidence.around.hosts)
        for peer in self.endpoint.connected():
            if peer not in dropped:
                self._met(peer)
        if was_beyond and not self.evidence.sightings:
            # Its contacts are on the internet, and have to be met again before it announces anything.
            self._joined = False
            self._settled.clear()
            self.verdicts = ()
            self.endpoint.announce(direct=())

    async def _check(self) -> None:
        """Runs one check, and decides when the next one is due."""
        self._checked_at = loop_time()
        self._check_due = float("inf")
        self.checks += 1
        self.evidence.forget_the_gone()
        await self._checks.run()
        self._settled.set()
        self._conclude()
        few = any(verdict.networks < NETWORKS for verdict in self.verdicts)
        pause = _EARLY[self.checks - 1] if few and self.checks <= len(_EARLY) else REST
        if any(verdict.dialable and self._checks.in_vain(verdict.family) for verdict in self.verdicts):
            pause = _EARLY[0]  # another check soon shows whether it was one bad moment
        self._check_due = min(self._check_due, loop_time() + pause * (1 + 0.25 * self.endpoint.random.random()))

    def _conclude(self) -> None:
        """Judges all evidence anew, and has the endpoint announce what follows."""
        if self._wish:
            self._settled.set()
            self._say()
            return
        if not self._joined and not self.evidence.sightings:
            return  # the first contact is being dialed
        self.verdicts = tuple(
            self.evidence.judge(family, self._checks.asked(family), unanswered=self._checks.unanswered(family))
            for family in self.evidence.families()
        )
        if not self.evidence.beyond or any(verdict.dialable for verdict in self.verdicts):
            self._settled.set()
        direct = self.evidence.announced(self.verdicts)
        if direct != self.endpoint.direct_addresses:
            self.endpoint.announce(direct=direct)
        self._say()

    def _say(self) -> None:
        sentence = self.sentence()
        if sentence == self._said:
            return
        self._said = sentence
        scope, stated = self.scope.name.lower(), self.evidence.stated
        event = events.ReachabilityChanged(self.dialable, scope, tuple(self.endpoint.addresses), sentence)
        self.endpoint.events.emit(event)
        if stated and self.dialable is not None and not set(self.endpoint.direct_addresses).intersection(stated):
            where = ", ".join(stated)
            text = f"nobody could dial this peer at {where}, so it is not announced there; look at firewall and router"
            self.endpoint.events.emit(events.Noticed("warning", text))

    # Helping itself

    async def _help(self) -> None:
        """Gives the relays up once it is proven that others can dial this peer; otherwise takes some. Asks the router
        for a port if nobody can dial this peer."""
        proven = any(verdict.dialable and verdict.how != "assumed" for verdict in self.verdicts)
        if self._relays is not None:
            await (self._relays.close() if proven else self._relays.start())
        if proven or self._make_mapping is None:
            return
        if self.mapping is not None:
            self.mapping.refresh()
        elif any(
            verdict.dialable is False and verdict.family != "IPv6" and not self.evidence.stated_in(verdict.family)
            for verdict in self.verdicts
        ):
            self.mapping = self._make_mapping(self.endpoint.listen_port)
            self._tasks.keep(self.endpoint.events, partial(self._follow, self.mapping))

    async def _follow(self, mapping: PortMapping) -> None:
        """Has each port that the router opens dialed back."""
        async for lease in mapping.leases():
            port = None if lease is None else lease.port
            if port != self.evidence.mapped:
                self.evidence.mapped = port
                self._checked_at = float("-inf")
                self._check_soon()
