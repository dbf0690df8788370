"""All roles share this: a home, a place in the network, a journal, admission to the run, and a summary."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from swarmcli.averaging.trust import PeerTrust
from swarmcli.checkpoints.layout import checkpoints_below, epoch_of
from swarmcli.dht import DHT, DHTNode
from swarmcli.errors import NetworkError, RecipeError, SwarmError, UsageError
from swarmcli.events import (
    Contribution,
    DriftMeasured,
    EpochAdvanced,
    Event,
    Events,
    Noticed,
    PeerConnected,
    RoundFinished,
    RoundsReplayed,
    StateDonated,
    StateDownloaded,
)
from swarmcli.files.durable import write_file
from swarmcli.journal import Journal, RunRecord
from swarmcli.machine.registry import LocalPeer, LocalPeers
from swarmcli.machine.sensors import Sensors
from swarmcli.network.addresses import is_direct, parse_address, place_of
from swarmcli.network.identity import PeerID
from swarmcli.network.membership import Membership
from swarmcli.optim import Optimizer, PeerDescription, PeerReport
from swarmcli.optim.config import Role
from swarmcli.optim.peers.proof import Heard, hear
from swarmcli.owner.invitations import membership_of
from swarmcli.owner.revocations import Revocations
from swarmcli.peer.activity import Activity
from swarmcli.peer.admission import HELLO, Admission, Hello
from swarmcli.peer.controls import PeerControls
from swarmcli.peer.disk import files_of
from swarmcli.peer.governor import Governor
from swarmcli.peer.home import CONTACTS, LINK, PORT, Home, addresses_in, remembered, running_beside
from swarmcli.peer.offering import RecipeService
from swarmcli.peer.processors import sharing_processors
from swarmcli.recipe import Link, Recipe, digest_of, fingerprint_of, offered
from swarmcli.recipe.fingerprint import agreed_leaves
from swarmcli.recipe.limit_store import LimitStore
from swarmcli.recipe.link import MOST_PEERS, OTHER_PLACES, places_of, scope_of_places
from swarmcli.recipe.offered import needs_in_words, offered_contents, offered_files
from swarmcli.run.certificate import FILE, ContributionCertificate
from swarmcli.run.contributions import Attestation
from swarmcli.run.counting import ContributionReader
from swarmcli.training.loop import ComputePace
from swarmcli.version import build

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Summary:
    """Counts of one process's life; bytes are those of rounds and states, not of small messages."""

    run_id: str
    role: str
    name: str = ""
    peer: str = ""  # its id, once it has one
    epoch: int = 0
    digest: str = ""  # of the parameters at `epoch`; equal on all peers that are in step
    lineage: str = ""
    epochs: int = 0  # stepped by this process
    samples: int = 0  # computed by this process and counted in an epoch; of a site, in its lives before as well
    lost: int = 0  # computed for an epoch that had not ended when this process left
    first_loss: float | None = None
    last_loss: float | None = None
    rounds: dict[str, int] = field(default_factory=lambda: {"committed": 0, "failed": 0, "undecided": 0})
    failures: list[str] = field(default_factory=list)  # the latest reasons
    replays: int = 0  # rounds that this peer missed and made up for
    drift: float | None = None  # of the parameters from the others', as last measured
    downloads: int = 0
    donations: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    def note(self, event: Event) -> None:
        """Listens to the peer's events."""
        match event:
            case EpochAdvanced():
                self.epoch, self.lineage = event.epoch, event.lineage
                self.epochs += 1
                self.samples += event.own_samples
                if event.loss is not None:
                    self.last_loss = event.loss
                    self.first_loss = event.loss if self.first_loss is None else self.first_loss
            case RoundFinished():
                self.rounds[event.outcome] += 1
                self.bytes_sent += event.bytes_sent
                self.bytes_received += event.bytes_received
                if event.reason:
                    self.failures = [*self.failures, event.reason][-20:]
            case RoundsReplayed():
                self.replays += event.rounds
                self.epoch, self.lineage = event.epoch, event.lineage
            case DriftMeasured():
                self.drift = event.distance
            case StateDownloaded():
                self.downloads += 1
                self.bytes_received += event.bytes
                self.epoch, self.lineage = event.epoch, event.lineage
            case StateDonated():
                self.donations += 1
                self.bytes_sent += event.bytes

    def write(self, path: Path) -> None:
        """Writes the file whole or not at all."""
        write_file(path, f"{json.dumps(asdict(self), indent=2)}\n".encode())


class RunPeer:
    """One process's membership of a run, as a context manager.

    Entering it makes the peer known to others of this machine, opens the journal, joins the DHT and shows the
    fingerprint to the first contacts. It raises MembershipError when the run is closed and this peer has no invitation,
    BootstrapError when a newcomer finds no contact that answers and takes it in, and FingerprintError when they refuse.
    A peer whose home knows others of the run tries on until one answers. Leaving it says goodbye and gives everything
    back, whatever happened inside.
    """

    def __init__(
        self,
        recipe: Recipe,
        role: Role,
        home: Home,
        *,
        contacts: Sequence[str] = (),
        port: int = 0,
        listener: Callable[[Event], None] | None = None,
        patience: float = 30.0,
        begins_anew: bool = False,
    ) -> None:
        """`port`: where it listens if the recipe names none; 0: where it did in its last life in this home, for links
        name that port, or where that is taken at any free one. `listener` hears this peer's events from the first
        on, those of joining included. `patience`: seconds for which a newcomer tries its first contacts again before
        it gives up. `begins_anew`: it begins the run from its first epoch if nobody who holds a later one can be
        reached, and waits for nobody; UsageError where its home holds a later one. Raises RecipeError if the user's
        configuration cannot be used."""
        if begins_anew and (found := checkpoints_below(home.path, recipe.run_id)):
            raise UsageError(
                f"--begin-anew: {found[0]} holds epoch {epoch_of(found[0])} of this run; leave the option out to go on "
                "from there, move the directory away, or give the run another run_id"
            )
        self.begins_anew = begins_anew
        self.heard: Sequence[Heard | None] = ()  # what the first contacts have shown of how far the run is
        self.recipe = recipe
        self.role: Role = role
        self.home = home
        self.contacts = tuple(contacts) or recipe.network.initial_peers
        self._port = port
        self._patience = patience
        self._optimizer: Optimizer | None = None  # once this peer takes part in the run
        self._accounts: ContributionReader | None = None  # likewise
        self.standing: Attestation | None = None  # of this peer's part, by a monitor; known when it leaves
        self._remembered = -math.inf  # when whom this peer knows was written last
        self._told: Link | None = None  # the link that was told last
        self._offered = ""  # the recipe as links hand it out; "": it cannot travel
        self._contents, self._files = "", dict[str, Path]()  # likewise of its saved model and tokenizer
        self.digest = ""  # the hash of the recipe, as in links; "": it cannot travel
        self._welcomed: Mapping[PeerID, tuple[str, ...]] = {}  # contacts in this run, and where they were dialed
        self.no_link = (
            "This peer has no link: nobody can dial it, and it knows no peer of the run that others could dial."
        )
        self.saved = ""  # what became of this peer's state when it left, in words
        self.outcome = "done"  # how this peer's part in the run ended, for the journal
        self.events = Events()
        self.summary = Summary(recipe.run_id, role)
        self.activity = Activity(self.events.emit)
        self.limits = LimitStore(recipe)
        self.pace = ComputePace(interrupted=lambda: self.activity.is_held)
        self._listener = listener
        self._exit = ExitStack()

    @property
    def peer_id(self) -> PeerID:
        return self.dht.peer_id

    def take_part(self, optimizer: Optimizer, accounts: ContributionReader) -> None:
        """From now on this peer knows who is in its run, and what each has given."""
        self._optimizer, self._accounts = optimizer, accounts

    def others_of_run(self) -> Mapping[PeerID, PeerReport]:
        return {} if self._optimizer is None else self._optimizer.peers()

    def contributions(self) -> Sequence[Contribution]:
        """Most samples first. From any thread."""
        return () if self._accounts is None else self._accounts.contributions()

    def rests_on(self) -> str:
        """Whose count the contributions are, in a sentence."""
        return "" if self._accounts is None else self._accounts.rests_on()

    def __enter__(self) -> RunPeer:
        with ExitStack() as undo:
            undo.callback((self.home.path / "peer.json").unlink, missing_ok=True)
            self._join(undo)
            self._exit = undo.pop_all()
        return self

    def _join(self, undo: ExitStack) -> None:
        recipe, local = self.recipe, self.recipe.local
        self.fingerprint = fingerprint_of(recipe)  # it reads the tokenizer's files, so once
        try:
            self._offered, self.digest = offered(recipe), digest_of(recipe)
            self._contents, self._files = offered_contents(recipe), offered_files(recipe)
        except RecipeError as error:
            self.no_link = str(error)
        hello = Hello(recipe.run_id, self.fingerprint, build())
        self._has_state = bool(checkpoints_below(self.home.path, recipe.run_id))
        proved = self._has_state and hello.is_of_home(self.home.path, agreed_leaves(recipe), self._way_apart())
        self.processors = undo.enter_context(sharing_processors(recipe, self.role, self.home.path))
        if not self.contacts:
            registry, me = LocalPeers(), LocalPeer.here(self.role, recipe.run_id, self.home.path)
            self.contacts = tuple(running_beside(me, registry.living))
        self.dht = DHT(
            (*self.contacts, *self._known_here()) if self.contacts else (),
            start=False,
            client_mode=local.client_mode,
            host=local.host or "",
            port=local.port or self._port,
            preferred_port=0 if "port" in local.model_fields_set else self._port_before(),
            announce_addresses=local.announce_addresses,
            port_mapping=local.port_mapping,
            relay=self.role != "trainer" if local.relay is None else local.relay,
            relay_rate=local.relay_rate,
            identity_path=local.identity_path or self.home.identity,
            startup_timeout=math.inf if remembered(self.home.path) else self._patience,
            further_peers=partial(self._known_here, everywhere=True),
            events=self.events,
        )
        undo.callback(self.dht.shutdown)
        self.dht.membership = membership_of(recipe, self.home.path, self.dht.identity, self.dht.clock.now)
        name = local.name or self.peer_id.short
        self.description = PeerDescription(self.role, name, local.device, local.team or "")
        self.summary.name, self.summary.peer = name, self.peer_id.text
        self.journal = Journal(
            self.home.journal,
            run=RunRecord(recipe.run_id, self.role, self.peer_id.text, name, build()),
            clock=time.time,
            size=local.journal_size,
        )
        undo.push(self._close_journal)
        self.journal.listen(self.events)
        no_more = self.events.subscribe(self._say_while_joining)  # before others that look when they hear of that
        if self._listener is not None:
            undo.callback(self.events.subscribe(self._listener))
        undo.callback(self.events.subscribe(self.summary.note))
        sensors = Sensors(files_of(recipe, self.home.path), LocalPeers().living)

        def warn(text: str) -> None:
            self.events.emit(Noticed("warning", text))

        controls = PeerControls(self.activity, self.limits, bool)

        def heed() -> None:
            for path, body in self.processors.entry.take_wishes():
                try:
                    controls.take_up(path, body)
                except SwarmError as error:
                    warn(f"what was asked while this peer was joining cannot be done: {error}")

        governor = Governor(self.limits, sensors, self.activity, self.pace, self.dht.limit_rates, warn, heed)
        self.governor = undo.enter_context(governor)  # first: limits hold for the first byte too
        self.dht.run_in_background(await_ready=True)
        no_more()
        if self.dht.membership is not None:
            self._follow_revocations(self.dht.membership, undo)
        if self.port:
            self._leave(PORT, str(self.port))
        admission = self.dht.run_coroutine(self._ask_for_admission(hello, proved))
        undo.callback(lambda: self.dht.run_coroutine(admission.close()) if self.dht.is_alive() else None)
        self._remember(self.acquaintances())
        undo.callback(self.events.subscribe(self._keep_remembering))

    def _say_while_joining(self, event: Event) -> None:
        """For `swarm status`, which cannot ask this peer yet."""
        if isinstance(event, Noticed):
            with suppress(OSError):
                self.processors.entry.say(event.text)

    def _follow_revocations(self, membership: Membership, undo: ExitStack) -> None:
        """Follows them, and proofs of lies: the owner's monitor averages nothing, and hears whom to revoke."""

        async def begin(dht: DHT, node: DHTNode) -> tuple[Revocations, PeerTrust]:
            revocations = Revocations(node, self.recipe.run_id, membership)
            trust = PeerTrust.of(node.endpoint, self.recipe.run_id)
            revocations.start()
            trust.start()
            return revocations, trust

        async def end() -> None:
            await revocations.close()
            await trust.stop()

        revocations, trust = self.dht.run_coroutine(begin)
        undo.callback(lambda: self.dht.run_coroutine(end()) if self.dht.is_alive() else None)

    def _way_apart(self) -> str:
        """How this peer could be a run of its own, in words."""
        home, run_id = shlex.quote(str(self.home.path)), self.recipe.run_id
        begins = f" --resume {home} --from-run {run_id}" if self._has_state else ""
        return f"begin another run with this one: add `--set run_id={run_id}-2{begins}`"

    async def _ask_for_admission(self, hello: Hello, proved: bool) -> Admission:
        endpoint = self.dht.endpoint
        admission = Admission(endpoint, hello, agreed_leaves(self.recipe), self._way_apart())
        if self._offered:
            service = RecipeService(
                endpoint,
                self.recipe.run_id,
                self._offered,
                self._roles_in_run,
                contents=self._contents,
                files=self._files,
            )
            self.events.subscribe(service.note)
        keep = partial(self._leave, HELLO, msgspec.json.encode(hello).decode())
        met = await self._meet_all(self.contacts, 10.0)
        self._welcomed = {peer: tuple(met[peer]) for peer in await admission.ask(met)}
        # Now: they may be gone before this peer has loaded its model.
        shown = (hear(endpoint, self.recipe.run_id, each, place_of(at[0])) for each, at in self._welcomed.items())
        self.heard = await asyncio.gather(*shown)
        if not self._welcomed:  # it has moved, perhaps: others would dial it where it was. 3 s, since they may be gone
            met |= (known := await self._meet_all(self._known_here(), 3.0))
            if met and not proved:
                await admission.ask(known, named=False)
                others = dict if self._has_state else self.others_of_run  # these stop nobody who has a state
                admission.tasks.spawn(admission.keep_asking(met, others, keep))
                return admission
        keep()
        return admission

    async def _meet_all(self, addresses: Sequence[str], timeout: float) -> dict[PeerID, list[str]]:
        """The peers that answer at these addresses, and at which of them each does."""
        found = await asyncio.gather(*(self._meet(address, timeout) for address in addresses))
        pairs = [(peer, address) for peer, address in zip(found, addresses, strict=True) if peer is not None]
        return {peer: [where for other, where in pairs if other == peer] for peer, _ in pairs}

    def _roles_in_run(self) -> list[Role]:
        others = self.others_of_run()
        return [self.role, *(report.role for peer, report in others.items() if peer != self.peer_id)]

    async def _meet(self, address: str, timeout: float) -> PeerID | None:
        """The peer that answers at a contact's address; None: nobody now. The DHT met at least one of them, and keeps
        probing the others."""
        named = parse_address(address).peer_id
        if named is not None and self.dht.endpoint.is_connected(named):  # another of its addresses leads there
            return named
        try:
            peer = await self.dht.endpoint.connect(address, timeout=timeout)
            await self.dht.node.core.ping(peer)
            return peer
        except NetworkError:
            return None

    def _close_journal(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.journal.close(self.outcome if kind is None else f"failed: {error}"[:300])

    def link(self) -> Link | None:
        """The link by which most others can join: through those peers that most can dial, this one among them or not,
        and of these first through those that stay. None: see `no_link`. From any thread; it may be another one from
        call to call."""
        if not self._offered:
            return None
        stays_less = partial(self._stays_less, self.others_of_run())
        named = self._named_by_links(stays_less)
        found = {peer: places for peer, addresses in named if (places := places_of(addresses))}
        widest = max(map(scope_of_places, found.values()), default=None)
        chosen = [peer for peer, places in found.items() if scope_of_places(places) == widest][:MOST_PEERS]
        if not chosen:
            return None
        # In a closed run the peer that comes first binds invitations: that is no matter of what others say of
        # themselves.
        first, *others = chosen if self.recipe.access == "invite" else sorted(chosen, key=stays_less)
        further = tuple((peer, found[peer][:OTHER_PLACES]) for peer in others)
        return Link(first, found[first], self.recipe.run_id, self.digest, others=further)

    def _named_by_links(self, stays_less: Callable[[PeerID], Any]) -> Iterator[tuple[PeerID, Sequence[str]]]:
        """This peer, the contacts that took it in, and others of the run where this peer has dialed them: nobody is
        sent to an address by hearsay. What others say of themselves orders these, and drives out neither this peer nor
        whom its user has named."""
        endpoint = self.dht.endpoint
        yield self.peer_id, endpoint.direct_addresses
        for contact, addresses in self._welcomed.items():
            if endpoint.is_connected(contact):
                yield contact, addresses
        others = sorted(self.others_of_run().keys() - self._welcomed.keys(), key=stays_less)
        for peer in others[:64]:
            seen = endpoint.seen(peer)
            if seen is not None and not (seen.relayed or seen.punched):
                yield peer, [address for address in endpoint.first_hand(peer) if is_direct(address)]

    def _stays_less(self, others: Mapping[PeerID, PeerReport], peer: PeerID) -> tuple[bool, float, bool, PeerID]:
        """By this links name monitors and auxiliaries first, then the trainers that have computed longest; this peer
        before its like."""
        report = others.get(peer)
        role = self.role if peer == self.peer_id else report.role if report else "trainer"
        samples = self.summary.samples if peer == self.peer_id else report.samples if report else 0
        return role == "trainer", -samples if role == "trainer" else 0.0, peer != self.peer_id, peer

    @property
    def has_trained(self) -> bool:
        """Whether this process has come into the run and done something that its home should keep."""
        return bool(self.summary.samples or self.summary.epoch)

    @property
    def port(self) -> int:
        """The port on which this peer listens, whether others can dial it or not; 0: it does not."""
        return self.dht.endpoint.listen_port

    def _known_here(self, *, everywhere: bool = False) -> list[str]:
        """Peers that run in the homes beside this one, and those that this one and they knew when they ran last. With
        them it finds the network again when its contacts are gone; whether all are of its run nobody knows.

        `everywhere`: also those whose homes lie elsewhere on this computer, for a peer that finds nobody else. From any
        thread.
        """
        own = self.home.path
        homes = [home for home in sorted(own.parent.glob("*-[1-9]*")) if home != own][:8]
        if everywhere:
            elsewhere = [Path(each.home) for each in LocalPeers().living() if each.run_id == self.recipe.run_id]
            found_there = [home for home in elsewhere if home.absolute() != own.absolute() and self._is_of_run(home)]
            homes = list(dict.fromkeys((*found_there[:8], *homes)))
        running = [address for home in homes for address in addresses_in(home / "peer.json", "addresses")]
        left = [address for home in homes for address in remembered(home)]
        found = dict.fromkeys((*remembered(own), *running, *left))
        return [each for each in found if each not in self.contacts][:32]

    def _is_of_run(self, home: Path) -> bool:
        """Whether a peer with a run id like ours takes part in this very run: others may have chosen the same name."""
        try:
            return bool(self.digest) and f"={self.digest}" in (home / LINK).read_text(encoding="utf-8")
        except (OSError, ValueError):
            return False

    def stand(self, standing: Attestation) -> None:
        """A monitor has told of this peer's part: what it signed stays in the home, for a certificate."""
        self.standing = standing
        with suppress(SwarmError):  # a full disk costs no more than this
            ContributionCertificate.make(standing).write(self.home.path / FILE)

    def _port_before(self) -> int:
        """0: none is known."""
        try:
            port = int((self.home.path / PORT).read_text())
        except (OSError, ValueError):
            return 0
        return port if 0 < port < 65536 else 0

    def _keep_remembering(self, event: Event) -> None:
        """Hears events on the loop, and writes a small file, once a second at most: a killed peer writes none."""
        due = time.monotonic() >= self._remembered + 1.0
        if due and isinstance(event, EpochAdvanced | PeerConnected) and self.dht.is_alive():
            self._remember(self.dht.node.known_addresses())

    def _remember(self, known: Iterable[str]) -> None:
        """Those of the run first, and those of earlier times last: a peer that has lost everybody forgets nobody."""
        self._remembered = time.monotonic()
        before, of_run = remembered(self.home.path), set(self.others_of_run())
        by_peer: dict[PeerID | None, dict[str, None]] = {}
        for address in (*known, *before):
            parsed = parse_address(address)
            if parsed.scheme == "tcp":
                by_peer.setdefault(parsed.peer_id, {})[address] = None
        # Eight peers, each at three addresses: one that has left the run costs a few dials at the next start.
        chosen = sorted(by_peer, key=lambda peer: peer not in of_run)[:8]
        kept = [address for peer in chosen for address in list(by_peer[peer])[:3]]
        if kept != before:
            self._leave(CONTACTS, json.dumps(kept))

    def _leave(self, name: str, text: str) -> None:
        """For the next life in this home. A full disk costs no more than this."""
        with suppress(OSError):
            write_file(self.home.path / name, text.encode())

    def acquaintances(self) -> list[str]:
        """Addresses of the peers that this one knows at present."""

        async def known(dht: DHT, node: DHTNode) -> list[str]:
            return node.known_addresses()

        return self.dht.run_coroutine(known)

    def has_another_link(self) -> bool:
        """Whether the link has changed since it was told: what others can dial is found out while a peer runs."""
        return self.link() != self._told

    def tell(self, dashboard: str = "") -> bool:
        """Leaves word in the home, while this peer lives, of how it can be reached: for scripts on this machine. The
        link stays there, unless it leads nowhere any more. Returns whether people should hear of it, since the link
        that was told before does less."""
        addresses, link, before = self.dht.get_visible_addresses(), self.link(), self._told
        told = {"peer": self.peer_id.text, "addresses": addresses, "dashboard": dashboard, "link": str(link or "")}
        if link:
            write_file(self.home.path / LINK, f"{link}\n{needs_in_words(self.recipe)}\n".encode())
        else:
            (self.home.path / LINK).unlink(missing_ok=True)
        write_file(self.home.path / "peer.json", json.dumps(told).encode())  # last: a script waits for it
        self._told = link
        if link is None or before is None:
            return link is not before
        leads_on = set(before.addresses) & set(link.addresses)
        return not leads_on or scope_of_places(before.places) != scope_of_places(link.places)

    def leave_summary(self, optimizer: Optimizer) -> None:
        """Writes down what this peer did and where it stands; a full disk costs the summary only."""
        summary = self.summary
        summary.epoch = optimizer.local_epoch
        summary.digest = "" if optimizer.auxiliary else optimizer.state_digest()
        if self.role == "trainer" and optimizer.use_gradient_averaging:
            summary.lost = optimizer.local_progress.samples_accumulated
        try:
            summary.write(self.home.summary)
        except OSError as error:
            logger.warning("%s was not written: %s", self.home.summary, error.strerror)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.dht.is_alive():
            self._remember(self.acquaintances())
        self._exit.__exit__(kind, error, trace)
