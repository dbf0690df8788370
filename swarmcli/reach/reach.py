"""Reach: everything by which a peer finds out whether others can dial it, and helps itself where they cannot.

One keeper task looks at the evidence, asks for dial-backs when it is time, and concludes; `verdict.py` says what
follows from the evidence, `dialback.py` asks. What the endpoint announces follows the verdicts, and with it whether
this peer is in client mode.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from swarmcli import events
from swarmcli.network.addresses import Address, Scope, format_address, parse_address, scope_of
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.limits import MAX_ADDRESSES
from swarmcli.network.loop_thread import set_within
from swarmcli.network.task_owner import TaskOwner, keep
from swarmcli.reach.dialback import DialBacks, DialBackService, Proof, read_probe
from swarmcli.reach.mapping import PortMapping
from swarmcli.reach.punch import Puncher
from swarmcli.reach.rates import RateService
from swarmcli.reach.relays import Relays
from swarmcli.reach.surroundings import look_around
from swarmcli.reach.verdict import (
    WANTED_NETWORKS,
    Ask,
    Family,
    Sighting,
    Surroundings,
    Verdict,
    families,
    family_of,
    host_of,
    judge,
    network_of,
)

logger = logging.getLogger(__name__)

PATIENCE = 2.0  # seconds for a dial-back before its silence counts; a nonce that comes later still counts
_SHORTEST_PATIENCE = 1.0  # with contacts next door: machines are busy when they start
_GLANCE = 0.2  # seconds between two looks at who can be asked, while a check runs
_TICK = 1e-3
CHECK_SECONDS = 600.0  # between two checks of a verdict at rest
_EARLY_CHECKS = (15.0, 60.0, 240.0)  # the first ones, while fewer than WANTED_NETWORKS could be asked
_SOONEST = 10.0  # seconds between two checks, however much contacts say that this peer has moved; twice as long …
_LONGEST_DOUBT = CHECK_SECONDS  # … each time that it has not, up to this
_AFTER_A_FAULT = 60.0  # seconds from a check that ended in a fault of our own to the next one
_LOOK_SECONDS = 5.0  # between two looks at the interfaces: laptops change their network
_RECONNECTED = 2.0  # seconds after a wake-up, when contacts should be connected again
_SIGHTING_SECONDS = 2 * CHECK_SECONDS  # how long the word of a contact that has gone still counts
_MAX_SIGHTINGS = 512
_MAX_CANDIDATES = 16  # contacts that are tried in one check, where many refuse


@dataclass(frozen=True, slots=True)
class ReachOptions:
    """What the user wants of reach."""

    port_mapping: bool = True  # ask the router to let others in where it does not
    relay: bool = False  # carry the connections of others who cannot dial each other


class Reach:
    """The keeper of one endpoint's reachability. `start` it on the loop, once the endpoint listens."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        contacts: Callable[[], Iterable[PeerID]] = tuple,
        options: ReachOptions = ReachOptions(),
        alone: bool = True,
        mapping: Callable[[int], PortMapping] | None = None,
        relays: Relays | None = None,
    ) -> None:
        """`contacts` are further peers that can be asked, of whom addresses are known. `alone`: there are no first
        contacts, so that nobody is waited for before this peer says where it can be dialed. `mapping(port)`
        makes a mapping for the listener."""
        self.endpoint = endpoint
        self.options = options
        self.verdicts: tuple[Verdict, ...] = ()
        self.checks = 0  # rounds of dial-backs so far
        self._contacts = contacts
        self._joined = alone  # whether whoever is to be met first has been met
        self._wish = False  # to be dialed by nobody: the endpoint does not even listen
        self._make_mapping, self._relays = mapping, relays
        self.around = Surroundings()  # the interfaces of this machine, and the networks behind them
        self.punch = Puncher(endpoint, around=lambda: self.around)
        self._stated: tuple[str, ...] = ()  # by the user; IP addresses alone …
        self._names: dict[str, tuple[str, ...]] = {}  # … of these host names, and of what was stated without one
        self._connected: dict[PeerID, None] = {}
        # With the time of the sighting.
        self._sightings: dict[PeerID, tuple[Sighting, float]] = {}  # the oldest first
        self._service = DialBackService(endpoint, lambda: list(self._connected))
        self._dial_backs = DialBacks(endpoint, lambda: self.around, self._news)
        self._rates = RateService(endpoint)
        self._nonces: dict[Family, tuple[bytes, ...]] = {}  # of each family's last check
        self.mapping: PortMapping | None = None  # that the router was asked for …
        self._mapped: int | None = None  # … and its outer port while it stands; of IPv4, which alone is translated
        self._checked_at = float("-inf")  # loop time
        self._check_due = float("inf")
        self._checking = False
        self._doubted = False  # whether contacts say that this peer has moved, since the last check
        self._doubt_pause = _SOONEST
        self._event = asyncio.Event()  # something happened that the keeper or a check should look at
        self._settled = asyncio.Event()
        self._tasks = TaskOwner()
        self._said = ""
        self._unsubscribe: Callable[[], None] = lambda: None

    # Life

    async def start(self) -> None:
        """Begins to look. Where there is nobody to ask, the first verdict is there at once."""
        self._wish = self.endpoint.never_listens
        self._stated, self._names = await _resolved(self.endpoint.stated_addresses)
        self.around = look_around(self.endpoint.listener_addresses)
        self._service.start()
        self._rates.start()
        self.endpoint.on_probe = self._probed
        self._unsubscribe = self.endpoint.events.subscribe(self._on_event)
        if self._joined:
            self._conclude()
        elif not self._wish:
            self.endpoint.announce(direct=())  # until the first verdict
        await self.punch.start()
        if self._wish and self._relays is not None:
            await self._relays.start()
        self._tasks.spawn(keep(self._keep, self.endpoint.events))

    async def settle(self, timeout: float) -> bool:
        """Waits for the first verdict, at most `timeout` seconds; whether it is there.

        Whoever calls it has met the first contacts by now. If they are on this machine or in its network, or if there
        are none, the verdict is there already.
        """
        self._joined = True
        self._conclude()
        return await set_within(self._settled, timeout)

    async def close(self) -> None:
        """Ends everything, and gives back what routers and relays were asked for. Idempotent."""
        self._unsubscribe()
        self.endpoint.on_probe = None
        await self._tasks.close()
        await self._service.close()
        self._rates.close()
        await self.punch.close()
        if self._relays is not None:
            await self._relays.close()
        mapping, self.mapping, self._mapped = self.mapping, None, None
        if mapping is not None:
            await mapping.withdraw()

    # What is known

    @property
    def dialable(self) -> bool | None:
        """Whether others can dial this peer; None: that is not known yet."""
        if any(verdict.dialable for verdict in self.verdicts):
            return True
        unknown = not self.verdicts or any(verdict.dialable is None for verdict in self.verdicts)
        return None if unknown and not self._settled.is_set() else False

    @property
    def scope(self) -> Scope:
        """From how far away, if it can be dialed; else how far away those are who cannot."""
        able = [verdict.scope for verdict in self.verdicts if verdict.dialable]
        return max(able or [verdict.scope for verdict in self.verdicts] or [Scope.HOST])

    @property
    def connected(self) -> tuple[PeerID, ...]:
        """Who is connected at this moment."""
        return tuple(self._connected)

    def sentence(self) -> str:
        """One sentence for people: what all this means for taking part."""
        if self._wish:
            return f"nobody dials this peer, as was wished; {self._instead()}"
        if self.dialable is None:
            return "this peer is finding out whether others can dial it"
        if not self.dialable and not any(verdict.dialable is False for verdict in self.verdicts):
            return f"nobody could be asked yet whether others can dial this peer; {self._instead()}"
        if not self.dialable:
            return f"others cannot dial this peer: its router or firewall lets nobody in; {self._instead()}"
        verdict = max((each for each in self.verdicts if each.dialable), key=lambda each: each.scope)
        if verdict.scope is Scope.HOST:
            return "peers on this machine can dial this peer"
        where = "peers in this network" if verdict.scope is Scope.LAN else "others"
        how = "" if verdict.how != "assumed" or verdict.scope is not Scope.INTERNET else ", as far as it knows"
        mapped = ", by a port that its router has opened for it" if verdict.how == "mapped" else ""
        return f"{where} can dial this peer at {verdict.address}{mapped}{how}"

    def _instead(self) -> str:
        relays = len(self.endpoint.addresses) - len(self.endpoint.direct_addresses)
        if relays:
            return f"it takes part through {relays} {'relay' if relays == 1 else 'relays'}, and dials those it can"
        return "it takes part with those whom it can dial"

    # Evidence

    def _on_event(self, event: events.Event) -> None:
        match event:
            case events.PeerConnected(peer):
                self._met(PeerID.parse(peer))
            case events.PeerDisconnected(peer):
                self._connected.pop(PeerID.parse(peer), None)
            case events.WokeUp():
                self._woke_up()
            case events.OwnAddressesChanged():
                self._say()  # relays have been found, or lost

    def _woke_up(self) -> None:
        """Meanwhile the router may have forgotten a port, or this machine may be somewhere else."""
        if self.mapping is not None:
            self.mapping.refresh()
        if self.verdicts and self._any_beyond():
            self._checked_at = asyncio.get_running_loop().time() - _SOONEST + _RECONNECTED
            self._check_soon()
        self._event.set()

    def _met(self, peer: PeerID) -> None:
        self._connected[peer] = None
        seen = self.endpoint.seen(peer)
        if seen is None or seen.relayed or not (host := host_of(seen.remote_address)):
            return
        observed = host_of(seen.observed_address) if seen.observed_address else None
        if not seen.dialed and not seen.listened:
            return  # made by both ends at once through their routers: it says nothing about whom others can dial
        now = asyncio.get_running_loop().time()
        self._sightings.pop(peer, None)
        self._sightings[peer] = Sighting(host, observed, came_in=seen.listened), now
        if len(self._sightings) > _MAX_SIGHTINGS:
            self._forget_one()
        self._conclude()
        if self._sightings[peer][0] in self.around.those_beyond(self._recent()):
            self._consider_check(family_of(host), observed)

    def _forget_one(self) -> None:
        """The oldest contact of the network that has the most: else whoever has many identities would be the only one
        that is known, and asked."""
        held = Counter(network_of(sighting.host) for sighting, _ in self._sightings.values())
        del self._sightings[max(self._sightings, key=lambda peer: held[network_of(self._sightings[peer][0].host)])]

    def _consider_check(self, family: Family, observed: str | None) -> None:
        """Somebody from beyond is there: a reason to ask if nobody was asked yet, if it dialed this peer at an address
        that this peer does not know, or if it sees this peer elsewhere than where it announces itself."""
        self._event.set()  # a check under way may ask it
        if self._checking:
            return
        verdict = self._verdict(family)
        if verdict is None or not verdict.dialable:
            due = family not in self._nonces
        elif scope_of(host_of(verdict.address)) is Scope.LAN:
            due = verdict.how != "assumed"
        else:
            due = False
            if observed is not None and observed not in map(host_of, verdict.addresses):
                # The word of one stranger, who may say it for ever: checks use up what contacts dial for this peer.
                self._doubted = True
                self._check_soon(self._doubt_pause)
        if due:
            self._check_soon()
        elif self._check_due == float("inf"):
            self._check_due = asyncio.get_running_loop().time() + CHECK_SECONDS

    def _check_soon(self, pause: float = _SOONEST) -> None:
        now = asyncio.get_running_loop().time()
        self._check_due = min(self._check_due, max(now, self._checked_at + pause))
        self._event.set()

    def _probed(self, peer: PeerID, remote_address: str, message: bytes) -> None:
        said = read_probe(message)
        if isinstance(said, Proof):
            self._dial_backs.heard(peer, remote_address, said.nonce)
        elif said is not None:
            self._service.wished(peer, remote_address, said.request)

    def _news(self) -> None:
        """A nonce has come. Of a check that is over, it may turn the verdict."""
        self._event.set()
        self._conclude()

    def _verdict(self, family: Family) -> Verdict | None:
        return next((verdict for verdict in self.verdicts if verdict.family == family), None)

    # Keeping

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(min(self._check_due, loop.time() + _LOOK_SECONDS)):
                await self._event.wait()
        self._event.clear()
        self._look_again()
        if loop.time() >= self._check_due and not self._wish:
            try:
                await self._check()
                await self._help()
            except Exception:
                self._check_due = min(self._check_due, loop.time() + _AFTER_A_FAULT)
                raise

    def _look_again(self) -> None:
        """Notices that this machine has moved to another network: then nothing of what was known of it holds.

        Containers and tunnels come and go without such a consequence, and so do further addresses.
        """
        if self._wish:
            return
        before = self.around
        try:
            around = look_around(self.endpoint.refresh_listener_addresses())
        except OSError as error:  # no descriptor is left, or an interface went while it was looked at
            logger.warning("this machine's interfaces cannot be looked at now: %s", error)
            return
        if around == before:
            return
        self.around = around
        left = {family_of(host_of(address)) for address in set(before.addresses) - set(around.addresses)}
        if left:
            logger.info("this machine has other addresses now: %s", ", ".join(around.addresses))
            self._forget(left, before)
        if set(around.addresses) - set(before.addresses) and self._any_beyond():
            self._check_soon()
        self._conclude()

    def _forget(self, left: set[Family], before: Surroundings) -> None:
        """What was found out in the families in which an address is gone. Who is still connected is met again."""
        was_beyond = bool(before.those_beyond(self._recent()))
        self._checked_at = float("-inf")  # the next check waits for nothing but contacts
        self._doubt_pause = _SOONEST
        for family in left:
            self._nonces.pop(family, None)
        for peer in [peer for peer, (seen, _) in self._sightings.items() if family_of(seen.host) in left]:
            del self._sightings[peer]
        self._dial_backs.forget()
        self.punch.forget()
        if self.mapping is not None:
            self.mapping.refresh()
        dropped = self.endpoint.leave_network(self.around.hosts)
        for peer in [peer for peer in self._connected if peer not in dropped]:
            self._met(peer)
        if was_beyond and not self._sightings:
            # Its contacts are in the internet, and have to be met again before it announces anything.
            self._joined = False
            self._settled.clear()
            self.verdicts = ()
            self.endpoint.announce(direct=())

    async def _check(self) -> None:
        """One round of dial-backs in each family, side by side."""
        loop = asyncio.get_running_loop()
        self._checked_at = loop.time()
        self._check_due = float("inf")
        self.checks += 1
        before, doubted, self._doubted = self.endpoint.direct_addresses, self._doubted, False
        now = loop.time()
        stale = [peer for peer, (_, at) in self._sightings.items() if now - at > _SIGHTING_SECONDS]
        for peer in stale:
            if peer not in self._connected:
                del self._sightings[peer]
        around = self.around
        found = self._families()
        self._checking = True
        try:
            async with asyncio.TaskGroup() as group:
                for family in found:
                    group.create_task(self._check_family(family))
        finally:
            self._checking = False
        if around is not self.around:
            return  # it moved meanwhile; the next check is due already
        self._settled.set()
        self._conclude()
        in_vain = doubted and self.endpoint.direct_addresses == before
        self._doubt_pause = min(2 * self._doubt_pause, _LONGEST_DOUBT) if in_vain else _SOONEST
        few = any(verdict.networks < WANTED_NETWORKS for verdict in self.verdicts)
        early = _EARLY_CHECKS[self.checks - 1] if few and self.checks <= len(_EARLY_CHECKS) else CHECK_SECONDS
        self._check_due = min(self._check_due, loop.time() + early * (1 + 0.25 * self.endpoint.random.random()))

    async def _check_family(self, family: Family) -> None:
        nonces, asked = await self._ask_around(family, {})
        before = self._verdict(family)
        known = before.dialable if before is not None else None  # the first verdict is not waited for twice as long
        if known is not None and nonces and not self._judge(family, nonces).dialable:
            # A verdict is not lost by one bad moment of three contacts: others are asked too, where there are some. And
            # they dial themselves: third peers may be liars, of whom somebody has sent one to each contact.
            left = known and self._candidates(family, asked)
            again, others = await self._ask_around(family, asked if left else {}, yourself=True)
            in_vain = not self._judge(family, again or nonces).dialable
            if known and in_vain and self._too_few((*nonces, *again), asked | others):
                return
            nonces = again or nonces
        if nonces:
            self._nonces[family] = nonces
            self._conclude()  # nobody waits for another family in which there is perhaps nobody to ask

    def _too_few(self, nonces: Sequence[bytes], asked: Mapping[PeerID, str]) -> bool:
        """Whether the silence of those who said yes takes no proved verdict away, as at least as many networks had no
        dial to give: it may be one liar's, and who waits for the others to be busy would be believed alone."""
        asks = self._dial_backs.asks(nonces, 0.0, 0.0)
        silent = {ask.network for ask in asks if not ask.proved}
        refused = set(asked.values()) - {ask.network for ask in asks}
        return len(silent) < WANTED_NETWORKS and len(refused) >= len(silent)

    async def _ask_around(
        self, family: Family, avoid: Mapping[PeerID, str], *, yourself: bool = False
    ) -> tuple[tuple[bytes, ...], dict[PeerID, str]]:
        """Has this peer dialed back on behalf of up to three contacts in unlike networks, those too that are met
        meanwhile. Returns their nonces, as soon as they say enough or have had their time, and who was asked, each
        with its network."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        under_way: dict[asyncio.Task[bytes | None], str] = {}
        taken: dict[str, bytes] = {}  # network → nonce
        asked: dict[PeerID, str] = {}
        try:
            while True:
                busy = set(taken) | set(under_way.values())
                for contact, network in self._candidates(family, {**asked, **avoid}):
                    if len(busy) < WANTED_NETWORKS and network not in busy and len(asked) < _MAX_CANDIDATES:
                        asked[contact] = network
                        busy.add(network)
                        port = self._port(family)
                        work = self._dial_backs.ask(contact, family, port, self._connected, yourself=yourself)
                        under_way[asyncio.create_task(work)] = network
                deadline = begun + self._patience(asked)
                # Less than a clock's tick before it is at it: a shorter wait would not get any further.
                if self._enough(taken.values(), len(under_way)) or loop.time() >= deadline - _TICK:
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
        self._event.clear()
        waiting = asyncio.ensure_future(self._event.wait())
        seconds = min(_GLANCE, max(0.0, deadline - asyncio.get_running_loop().time()))
        try:
            await asyncio.wait({waiting, *tasks}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()

    def _patience(self, asked: Iterable[PeerID]) -> float:
        """The seconds for a dial-back: a call to a third peer, its connection and greetings are six round trips, of
        lengths that are guessed from those to the contacts."""
        known = [self.endpoint.round_trip(peer) for peer in asked]
        longest = max((seconds for seconds in known if seconds is not None), default=PATIENCE)
        return min(PATIENCE, _SHORTEST_PATIENCE + 6 * longest)

    def _enough(self, nonces: Iterable[bytes], unanswered: int) -> bool:
        """Whether no further answer of those who were asked could turn the verdict."""
        asks = self._dial_backs.asks(nonces, 0.0, float("inf"))
        proofs = sum(ask.proved for ask in asks)
        return proofs > 0 and proofs >= len(asks) - proofs + unanswered

    def _candidates(self, family: Family, without: Collection[PeerID]) -> list[tuple[PeerID, str]]:
        """Who may be asked, each with its network: contacts beyond this peer's own network, connected ones first; the
        order within is drawn by lot, so that a contact cannot count on being asked."""
        found: list[tuple[PeerID, str]] = []
        elsewhere: list[tuple[PeerID, str]] = []
        beyond = set(self.around.those_beyond(self._recent()))
        for peer in self._connected:
            sighting, _ = self._sightings.get(peer, (None, 0.0))
            if peer in without or sighting is None or sighting not in beyond:
                continue
            if family_of(sighting.host) == family:
                found.append((peer, network_of(sighting.host)))
            elif (network := self._network_in(family, peer)) is not None:
                elsewhere.append((peer, network))
        for peer in self._contacts():
            known = peer in self._connected or peer in without
            if not known and (network := self._network_in(family, peer)) is not None:
                elsewhere.append((peer, network))
        for each in (found, elsewhere):
            self.endpoint.random.shuffle(each)
        return [*found, *elsewhere][: 4 * _MAX_CANDIDATES]

    def _network_in(self, family: Family, peer: PeerID) -> str | None:
        for address in self.endpoint.addresses_of(peer):
            host = host_of(address)
            if host and family_of(host) == family and self.around.beyond(Sighting(host)):
                return network_of(host)
        return None

    def _port(self, family: Family) -> int:
        """Where others are to dial: as the user states, as the router maps, or where this peer listens."""
        stated = self._stated_in(family)
        if stated:
            return parse_address(stated[0]).port
        return (self._mapped if family != "IPv6" else None) or self.endpoint.listen_port

    # Concluding

    def _families(self) -> list[Family]:
        found = families(self.around, self._recent(), self._stated)
        return [family for family in found if self._stated_in(family)] if self._stated else found

    def _recent(self) -> list[Sighting]:
        return [sighting for sighting, _ in self._sightings.values()]

    def _any_beyond(self) -> bool:
        return bool(self.around.those_beyond(self._recent()))

    def _stated_in(self, family: Family) -> tuple[str, ...]:
        return tuple(address for address in self._stated if family_of(host_of(address)) == family)

    def _judge(self, family: Family, nonces: Sequence[bytes]) -> Verdict:
        asks: list[Ask] = self._dial_backs.asks(nonces, asyncio.get_running_loop().time(), 0.0)
        verdict = judge(family, self.around, self._recent(), asks, self._stated_in(family))
        if family != "IPv6" and verdict.how == "dialed back" and parse_address(verdict.address).port == self._mapped:
            return replace(verdict, how="mapped")
        return verdict

    def _conclude(self) -> None:
        """Judges all evidence anew, and has the endpoint announce what follows."""
        if self._wish:
            self._settled.set()
            self._say()
            return
        if not self._joined and not self._sightings:
            return  # the first contact is being dialed
        verdicts = tuple(self._judge(family, self._nonces.get(family, ())) for family in self._families())
        if not self._any_beyond() or any(verdict.dialable for verdict in verdicts):
            self._settled.set()
        self.verdicts = verdicts
        direct = self._with_names(dict.fromkeys(address for each in verdicts for address in each.addresses))
        if direct != self.endpoint.direct_addresses:
            self.endpoint.announce(direct=direct)
        self._say()

    def _with_names(self, addresses: Iterable[str]) -> tuple[str, ...]:
        """With the host names that lead there, for people; one that cannot be resolved here may lead there, too."""
        found = tuple(addresses)
        names = tuple(name for name, known in self._names.items() if not known or set(known).intersection(found))
        if found and names and not self._stated and all(verdict.how == "assumed" for verdict in self.verdicts):
            return names  # as the user wants it, instead of what the listener has found
        return (*(names if found else ()), *found)[:MAX_ADDRESSES]

    def _say(self) -> None:
        sentence = self.sentence()
        if sentence == self._said:
            return
        self._said = sentence
        scope = self.scope.name.lower()
        event = events.ReachabilityChanged(self.dialable, scope, tuple(self.endpoint.addresses), sentence)
        self.endpoint.events.emit(event)
        announced = set(self.endpoint.direct_addresses)
        if self._stated and self.dialable is not None and not announced.intersection(self._stated):
            where = ", ".join(self._stated)
            text = f"this peer was to be announced at {where}, but nobody's dial came in there, so it is not"
            self.endpoint.events.emit(events.Noticed("warning", text))

    # Helping itself

    async def _help(self) -> None:
        """Where nobody can dial this peer, relays carry its connections, and the router is asked for a port."""
        if self._relays is not None:
            await (self._relays.close() if self.dialable else self._relays.start())
        if self.dialable or self._make_mapping is None or not self.options.port_mapping:
            return
        if self.mapping is not None:
            self.mapping.refresh()
        elif any(
            each.dialable is False and each.family != "IPv6" and not self._stated_in(each.family)
            for each in self.verdicts
        ):
            self.mapping = self._make_mapping(self.endpoint.listen_port)
            self._tasks.spawn(keep(partial(self._follow, self.mapping), self.endpoint.events))

    async def _follow(self, mapping: PortMapping) -> None:
        """Has each port that the router opens dialed back."""
        async for lease in mapping.leases():
            port = None if lease is None else lease.port
            if port != self._mapped:
                self._mapped = port
                self._checked_at = float("-inf")
                self._check_soon()


async def _resolved(addresses: Sequence[str]) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """What the user states, with IP addresses for host names, which other peers do not resolve; and the names, each
    with its addresses. A name that cannot be resolved now has none, and is warned of."""
    literals: dict[str, None] = {}
    names: dict[str, tuple[str, ...]] = {}
    for text in addresses:
        place = parse_address(text)
        if place.scheme != "tcp" or family_of(place.host) != "memory":
            literals[text] = None
            continue
        names[text] = ()
        try:
            entries = await asyncio.get_running_loop().getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
            names[text] = tuple(format_address(Address("tcp", str(entry[4][0]), place.port)) for entry in entries)
        except OSError as error:
            logger.warning("%s is announced, but %s cannot be resolved: %s", text, place.host, error)
        literals.update(dict.fromkeys(names[text]))
    return tuple(literals), names
