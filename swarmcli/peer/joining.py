"""How a peer is made and joins its run, in two functions; and how it leaves, in reverse order."""

from __future__ import annotations

import asyncio
import math
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from swarmcli.averaging.trust import PeerTrust
from swarmcli.checkpoints.layout import checkpoints_below, epoch_of
from swarmcli.dht import DHT, DHTNode
from swarmcli.errors import NetworkError, UsageError
from swarmcli.events import Event, Events, Noticed
from swarmcli.journal import Journal, RunRecord
from swarmcli.machine.registry import LocalPeer, LocalPeers
from swarmcli.machine.sensors import Sensors
from swarmcli.network.addresses import parse_address, place_of
from swarmcli.network.identity import PeerID
from swarmcli.network.membership import Membership
from swarmcli.optim import PeerDescription
from swarmcli.optim.config import Role
from swarmcli.optim.peers.proof import hear
from swarmcli.owner.invitations import membership_of
from swarmcli.owner.revocations import Revocations
from swarmcli.peer.acquaintances import Acquaintances
from swarmcli.peer.activity import Activity
from swarmcli.peer.admission import HELLO, Admission, Hello
from swarmcli.peer.disk import files_of
from swarmcli.peer.governor import Governor
from swarmcli.peer.home import PORT, Home, remembered, running_beside
from swarmcli.peer.links import RecipeOffer, RunLinks
from swarmcli.peer.members import RunMembers
from swarmcli.peer.offering import RecipeService
from swarmcli.peer.peer import RunPeer
from swarmcli.peer.processors import sharing_processors
from swarmcli.peer.summary import Summary
from swarmcli.recipe import Recipe, fingerprint_of
from swarmcli.recipe.fingerprint import agreed_leaves
from swarmcli.recipe.limit_store import LimitStore
from swarmcli.training.loop import ComputePace
from swarmcli.version import build


@dataclass(frozen=True)
class ReadyPeer:
    """A peer that exists whole, before it looks for its run."""

    peer: RunPeer
    offer: RecipeOffer
    hello: Hello
    apart: str  # how it could be a run of its own, in words
    acquaintances: Acquaintances
    newcomer: bool  # the home holds no state of the run
    proved: bool  # the home says that its state is of this recipe


@contextmanager
def join_run(recipe: Recipe, role: Role, home: Home, **options: Any) -> Iterator[RunPeer]:
    """Makes this process a peer of the run while the block lasts: see `ready_peer` and `joined`."""
    with ready_peer(recipe, role, home, **options) as ready, joined(ready):
        yield ready.peer


@contextmanager
def ready_peer(
    recipe: Recipe,
    role: Role,
    home: Home,
    *,
    contacts: Sequence[str] = (),
    port: int = 0,
    listener: Callable[[Event], object] = bool,
    patience: float = 30.0,
    begins_anew: bool = False,
) -> Iterator[ReadyPeer]:
    """Makes all that a peer works with: it can be asked, paused and limited, and is not in the network yet. At the end
    everything is given back, whatever happened inside.

    `port`: where it listens if the recipe names none; 0: the port of the last process in this home, since links name
    it, or any free one if that is taken. `listener` hears this peer's events from the first on, also those of joining.
    `patience`: seconds for which a newcomer tries its first contacts again before it gives up; a peer whose home knows
    others of the run goes on until one answers. `begins_anew`: it begins the run from its first epoch if nobody who
    holds a later one can be reached, and waits for nobody.

    Raises RecipeError if the user's configuration cannot be used, UsageError for `begins_anew` if the home holds a
    later epoch, FingerprintError if it holds a state of another recipe, and MembershipError when the run is closed and
    this peer has no invitation.
    """
    found = checkpoints_below(home.path, recipe.run_id)
    if begins_anew and found:
        raise UsageError(
            f"--begin-anew: {found[0]} holds epoch {epoch_of(found[0])} of this run; leave the option out to go on "
            "from there, move the directory away, or give the run another run_id"
        )
    limits = LimitStore(recipe)
    # reads the tokenizer's files, so it is called once
    offer, fingerprint = RecipeOffer.of(recipe), fingerprint_of(recipe)
    hello, apart = Hello(recipe.run_id, fingerprint, build()), run_apart(recipe, home, has_state=bool(found))
    proved = bool(found) and hello.is_of_home(home.path, agreed_leaves(recipe), apart)
    with ExitStack() as leaving:
        home.forget_word()
        leaving.callback(home.forget_word)
        processors = leaving.enter_context(sharing_processors(recipe, role, home.path))
        contacts = tuple(contacts) or recipe.network.initial_peers or contacts_beside(recipe, role, home)
        events, members = Events(), RunMembers()
        acquaintances = Acquaintances(home, contacts, lambda: members.others().keys())
        dht = network_of(recipe, role, home, contacts, acquaintances, events, port=port, patience=patience)
        leaving.callback(dht.shutdown)
        dht.membership = membership_of(recipe, home.path, dht.identity, dht.clock.now)
        name = recipe.local.name or dht.peer_id.short
        summary = Summary(recipe.run_id, role, name, dht.peer_id.text)
        activity = Activity(events.emit)
        pace = ComputePace(interrupted=lambda: activity.is_held)
        journal = Journal(
            home.journal,
            run=RunRecord(recipe.run_id, role, dht.peer_id.text, name, build()),
            clock=time.time,
            size=recipe.local.journal_size,
        )

        @leaving.push
        def close_journal(kind: object, error: BaseException | None, trace: object) -> None:
            journal.close(peer.outcome if error is None else f"failed: {error}"[:300])

        journal.listen(events)
        leaving.callback(events.subscribe(listener))
        leaving.callback(events.subscribe(summary.note))
        sensors = Sensors(files_of(recipe, home.path), LocalPeers().living)
        governor = Governor(limits, sensors, activity, pace, dht.limit_rates, partial(warn, events))
        leaving.enter_context(governor)  # entered before the network: limits hold for the first byte too
        peer = RunPeer(
            recipe=recipe,
            role=role,
            home=home,
            contacts=contacts,
            begins_anew=begins_anew,
            fingerprint=fingerprint,
            digest=offer.digest,
            processors=processors,
            dht=dht,
            description=PeerDescription(role, name, recipe.local.device, recipe.local.team or ""),
            events=events,
            journal=journal,
            summary=summary,
            activity=activity,
            limits=limits,
            pace=pace,
            governor=governor,
            members=members,
            links=RunLinks(recipe, role, home, dht, offer, summary, members),
        )
        yield ReadyPeer(peer, offer, hello, apart, acquaintances, not found, proved)


@contextmanager
def joined(ready: ReadyPeer) -> Iterator[None]:
    """The peer is in its run while the block lasts; then it says goodbye.

    Raises BootstrapError when a newcomer finds no contact that answers and takes it in, and FingerprintError when the
    contacts refuse.
    """
    peer, acquaintances = ready.peer, ready.acquaintances
    dht = peer.dht

    def remember() -> None:
        if dht.is_alive():
            acquaintances.remember(dht.run_coroutine(known_addresses))

    with ExitStack() as leaving:
        dht.run_in_background(await_ready=True)
        if dht.membership is not None:
            leaving.enter_context(following_revocations(dht, peer.recipe.run_id, dht.membership))
        if peer.port:
            peer.home.leave(PORT, str(peer.port))
        admission = dht.run_coroutine(serve_newcomers(ready))
        leaving.callback(lambda: dht.run_coroutine(admission.close()) if dht.is_alive() else None)
        dht.run_coroutine(ask_for_admission(ready, admission))
        remember()
        leaving.callback(peer.events.subscribe(partial(acquaintances.note, dht)))
        leaving.callback(remember)
        yield


def run_apart(recipe: Recipe, home: Home, *, has_state: bool) -> str:
    """How this peer could be a run of its own, in words."""
    path, run_id = shlex.quote(str(home.path)), recipe.run_id
    begins = f" --resume {path} --from-run {run_id}" if has_state else ""
    return f"begin another run with this one: add `--set run_id={run_id}-2{begins}`"


def contacts_beside(recipe: Recipe, role: Role, home: Home) -> tuple[str, ...]:
    return tuple(running_beside(LocalPeer.here(role, recipe.run_id, home.path), LocalPeers().living))


def network_of(
    recipe: Recipe,
    role: Role,
    home: Home,
    contacts: Sequence[str],
    acquaintances: Acquaintances,
    events: Events,
    *,
    port: int,
    patience: float,
) -> DHT:
    """Returns the peer's place in the network, not running yet."""
    local = recipe.local
    return DHT(
        (*contacts, *acquaintances.here()) if contacts else (),
        start=False,
        client_mode=local.client_mode,
        host=local.host or "",
        port=local.port or port,
        preferred_port=0 if "port" in local.model_fields_set else home.port_before(),
        announce_addresses=local.announce_addresses,
        port_mapping=local.port_mapping,
        relay=role != "trainer" if local.relay is None else local.relay,
        relay_rate=local.relay_rate,
        identity_path=local.identity_path or home.identity,
        startup_timeout=math.inf if remembered(home.path) else patience,
        further_peers=acquaintances.here,
        events=events,
    )


def warn(events: Events, text: str) -> None:
    events.emit(Noticed("warning", text))


@contextmanager
def following_revocations(dht: DHT, run_id: str, membership: Membership) -> Iterator[None]:
    """Follows revocations, and proofs of lies: the owner's monitor averages nothing, so it hears here whom to
    revoke."""

    async def begin(dht: DHT, node: DHTNode) -> tuple[Revocations, PeerTrust]:
        revocations = Revocations(node.endpoint, membership)
        trust = PeerTrust.of(node.endpoint, run_id)
        revocations.start()
        trust.start()
        return revocations, trust

    async def end() -> None:
        await revocations.close()
        await trust.stop()

    revocations, trust = dht.run_coroutine(begin)
    try:
        yield
    finally:
        if dht.is_alive():
            dht.run_coroutine(end())


async def serve_newcomers(ready: ReadyPeer) -> Admission:
    """From now on this peer tells others whether they are of its run, and hands out the recipe if that can travel."""
    peer, offer = ready.peer, ready.offer

    def roles() -> list[Role]:
        others = peer.members.others().items()
        return [peer.role, *(report.role for each, report in others if each != peer.peer_id)]

    if offer.text:
        service = RecipeService(
            peer.dht.endpoint, peer.recipe.run_id, offer.text, roles, contents=offer.contents, files=offer.files
        )
        peer.events.subscribe(service.note)
    return Admission(peer.dht.endpoint, ready.hello, agreed_leaves(peer.recipe), ready.apart)


async def ask_for_admission(ready: ReadyPeer, admission: Admission) -> None:
    """Shows the fingerprint to the contacts, and hears from those that take this peer in how far the run is. Raises
    FingerprintError."""
    peer, dht, run_id = ready.peer, ready.peer.dht, ready.peer.recipe.run_id
    keep = partial(peer.home.leave, HELLO, msgspec.json.encode(ready.hello).decode())
    met = await meet_all(dht, peer.contacts, 10.0)
    peer.links.welcomed = {each: tuple(met[each]) for each in await admission.ask(met)}
    # Asked now: they may be gone before this peer has loaded its model.
    shown = (hear(dht.endpoint, run_id, each, place_of(at[0])) for each, at in peer.links.welcomed.items())
    peer.heard = await asyncio.gather(*shown)
    if not peer.links.welcomed:  # perhaps this peer has moved, and others dial its old address. 3 s: they may be gone
        met |= (known := await meet_all(dht, ready.acquaintances.here(), 3.0))
        if met and not ready.proved:
            await admission.ask(known, named=False)
            # others than contacts may not stop a peer with a state
            others = peer.members.others if ready.newcomer else dict
            admission.tasks.spawn(admission.keep_asking(met, others, keep))
            return
    keep()


async def meet_all(dht: DHT, addresses: Sequence[str], timeout: float) -> dict[PeerID, list[str]]:
    """Returns the peers that answer at these addresses, each with the addresses at which it does."""
    found = await asyncio.gather(*(meet(dht, address, timeout) for address in addresses))
    pairs = [(peer, address) for peer, address in zip(found, addresses, strict=True) if peer is not None]
    return {peer: [where for other, where in pairs if other == peer] for peer, _ in pairs}


async def meet(dht: DHT, address: str, timeout: float) -> PeerID | None:
    """Returns the peer that answers at a contact's address; None: nobody now. The DHT has met at least one contact, and
    keeps probing the others."""
    named = parse_address(address).peer_id
    if named is not None and dht.endpoint.is_connected(named):  # through another of its addresses
        return named
    try:
        peer = await dht.endpoint.connect(address, timeout=timeout)
        await dht.node.core.ping(peer)
        return peer
    except NetworkError:
        return None


async def known_addresses(dht: DHT, node: DHTNode) -> list[str]:
    return node.known_addresses()
