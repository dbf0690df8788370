"""What `join`, `aux` and `monitor` share around their role: home, network, signals, page, live view."""

from __future__ import annotations

import math
import shlex
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swarmcli.cli.console import err, out, setup_logging
from swarmcli.cli.ending import stop_on_signals
from swarmcli.cli.leaving import FirstEar, Leaving
from swarmcli.cli.live import LiveView
from swarmcli.cli.page import PageOptions, PagePorts, naming
from swarmcli.cli.site.process import SiteProcess
from swarmcli.errors import BootstrapError, MembershipError, NoDonorReachable
from swarmcli.events import (
    EpochAdvanced,
    Event,
    Noticed,
    OwnAddressesChanged,
    PeerConnected,
    PeerDisconnected,
    ReachabilityChanged,
)
from swarmcli.journal import printable
from swarmcli.machine.registry import LocalPeers
from swarmcli.network.addresses import parse_address
from swarmcli.optim.config import Role
from swarmcli.peer.controls import PeerControls
from swarmcli.peer.home import Home
from swarmcli.peer.joining import joined, ready_peer
from swarmcli.peer.peer import RunPeer
from swarmcli.recipe import Recipe
from swarmcli.recipe.offered import data_lacking, evaluated_datasets, joining
from swarmcli.run.alerts import Alerts
from swarmcli.run.observer import Observer
from swarmcli.run.source import DashboardSource, Providers
from swarmcli.run.values import RunStatus
from swarmcli.run.watch import RunWatch
from swarmcli.words import some

NO_PAGE = PageOptions()
CHANGE_LINKS = (EpochAdvanced, ReachabilityChanged, OwnAddressesChanged, PeerConnected, PeerDisconnected)
GONE = "The link that was told before no longer holds."
OWN_KEYS = ("local.", "output_dir", "checkpoint.", "network.")  # keys in which the peers of a run may differ


@dataclass(frozen=True)
class Session:
    """What a role runs with."""

    peer: RunPeer
    watch: RunWatch
    stop: threading.Event  # set when the role is to end


@contextmanager
def session_of(
    role: Role,
    recipe: Recipe,
    contacts: Sequence[str],
    home: Path | None = None,
    *,
    port: int = 0,
    verbose: bool = False,
    plain: bool = False,
    page: PageOptions = NO_PAGE,
    begins_anew: bool = False,
    process: SiteProcess | None = None,
) -> Iterator[Session]:
    """Joins the run and shows it, on the terminal and on a page. At the end the peer says goodbye, and the command ends
    with 130 after Ctrl-C. Signals in between: see Leaving.

    `port`: where this peer listens if the recipe names none; 0: where it last listened. `plain`: lines instead of a
    screen that is redrawn. `begins_anew`: see ready_peer. `process`: this one is rank 0 of a site.
    """
    setup_logging(verbose)
    for contact in contacts:
        parse_address(contact)
    ear, leaving = FirstEar(), None
    try:
        with ExitStack() as undo:
            web = undo.enter_context(PagePorts(page))
            own = undo.enter_context(home_of(role, recipe, home, process))
            as_what = f"a site of {recipe.local.site.processes} processes" if process else role
            err.print(f"joining the run {recipe.run_id} as {as_what}; my files are in {own.path}", soft_wrap=True)
            say_who_runs_already(role, own)
            ready = undo.enter_context(
                ready_peer(recipe, role, own, contacts=contacts, port=port, listener=ear, begins_anew=begins_anew)
            )
            peer = ready.peer
            if role != "auxiliary" and (gone := data_lacking(recipe, evaluated_datasets(recipe))):
                peer.events.emit(Noticed("warning", f"this peer cannot evaluate the model: {gone}"))
            watch = RunWatch(peer, partial(join_line, recipe, peer))
            undo.callback(watch.close)
            leaving = Leaving(peer, watch, of_site=bool(process), patience=process.patience if process else math.inf)
            controls = PeerControls(
                peer.activity,
                peer.limits,
                leaving.asked,
                apply=peer.governor.look,
                seat=watch.seat,
            )
            source, alerts = source_of(peer, watch, controls)
            # entered before joining, so it is served while the peer looks for its run
            address = undo.enter_context(web.served(peer, source, controls))
            undo.enter_context(told_of_refusal(joined(ready), ear))
            say_where_it_begins(role, recipe, contacts, peer)
            undo.enter_context(stop_on_signals(leaving.signalled))
            undo.enter_context(Observer(source.look, peer.events, alerts, recipe.local.webhook, watch.news))
            say_how_to_join(peer, watch.look())
            peer.links.tell(address)
            undo.callback(peer.events.subscribe(partial(tell_anew, peer, address)))
            ear.prints = False
            leaving.say = undo.enter_context(view_of(peer, source, plain=plain)).say
            yield Session(peer, watch, ear.stop)
    except NoDonorReachable:
        if leaving is None or not (leaving.interrupted or ear.expelled):
            raise
    leaving.end(ear.expelled)


def home_of(role: Role, recipe: Recipe, home: Path | None, process: SiteProcess | None) -> Home:
    if process and process.home:
        return Home(process.home, None)
    return Home.at(home) if home else Home.claim(recipe.output_dir / recipe.run_id, role)


@contextmanager
def told_of_refusal(joining: AbstractContextManager[None], ear: FirstEar) -> Iterator[None]:
    """Raises MembershipError if the contacts that this peer met do not accept it, and have hung up."""
    with ExitStack() as undo:
        try:
            with naming("--port"):
                undo.enter_context(joining)
        except BootstrapError:
            if not ear.expelled:
                raise
        if ear.expelled:
            raise MembershipError(ear.expelled)
        yield


def say_who_runs_already(role: Role, own: Home) -> None:
    """Somebody who types the same command in a second window may not want a second peer."""
    here = str(own.path.absolute())
    beside = [
        each
        for each in LocalPeers().peers()
        if each.role == role and each.home != here and Path(each.home).parent == Path(here).parent
    ]
    if beside:
        names = some([each.label for each in beside])
        told = f"this computer already takes part in this run, as {names}; this is one more peer, {own.path.name}"
        err.print(printable(told, 400), soft_wrap=True)


def say_where_it_begins(role: Role, recipe: Recipe, contacts: Sequence[str], peer: RunPeer) -> None:
    if contacts or recipe.network.initial_peers:
        return
    if peer.contacts:
        told = "no first contact is given; a peer of this run runs on this computer, and this one joins it there"
    elif role != "monitor":
        told = "no first contact is given, so this peer begins a network of its own; others join it"
    else:
        return
    err.print(told, soft_wrap=True)  # one line in a log


def source_of(peer: RunPeer, watch: RunWatch, controls: PeerControls) -> tuple[DashboardSource, Alerts]:
    """Returns all that terminal and page show."""
    alerts = Alerts()
    providers = Providers(
        activity=controls.activity,
        limits=controls.limits,
        contributions=peer.members.contributions,
        rests_on=peer.members.rests_on,
        told_by=peer.members.told_by,
        checkpoints=peer.home.path / "checkpoints",
        alerts=lambda: alerts.standing,
    )
    return DashboardSource(peer.journal, watch.look, providers), alerts


def view_of(peer: RunPeer, source: DashboardSource, *, plain: bool) -> LiveView:
    return LiveView(
        source.look,
        peer.events,
        console=err,
        me=lambda status: source.overview_of(status).me,
        plain=plain,
        clock=time.time,
    )


def tell_anew(peer: RunPeer, dashboard: str, event: Event) -> None:
    """A peer that turns out to be dialable, or moves, or whose contact leaves, has another link or none. This is rare,
    and the files are small, so they are written here, where the event is heard."""
    if not isinstance(event, CHANGE_LINKS) or not peer.links.has_another_link():
        return
    if not peer.links.tell(dashboard):
        return
    link = peer.link()
    told = f"others join from now on with: {joining(link, peer.recipe)}" if link else f"{GONE} {peer.no_link}"
    peer.events.emit(Noticed("info", told))


def say_how_to_join(peer: RunPeer, status: RunStatus) -> None:
    """Prints to stdout a line that can be typed; to people, for whom it is of use."""
    if status.link or not peer.dht.client_mode:
        out.print(f"join with: {status.join_line}", soft_wrap=True)
    if status.link_reach:
        err.print(printable(status.link_reach, 600), soft_wrap=True)


def join_line(recipe: Recipe, peer: RunPeer) -> str:
    """Returns the command with which others join by the recipe file, if there is no link; it contains the overrides
    that they need too."""
    common = [each for each in recipe.overrides if isinstance(each, str) and not each.startswith(OWN_KEYS)]
    addresses = peer.dht.get_visible_addresses()[:1]
    words = ["swarm", "join", recipe.file]
    words += [part for word in common for part in ("--set", word)]
    return shlex.join([*words, *(part for address in addresses for part in ("--peer", address))])
