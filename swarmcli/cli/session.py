"""The part that `join`, `aux` and `monitor` share around their role: recipe, home, network, signals, live view."""

from __future__ import annotations

import logging
import math
import secrets
import shlex
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import typer

from coordinator_web.background import is_exposed, listen, serving, url_of
from swarmcli.cli.console import err, out, setup_logging
from swarmcli.cli.contributions import thanks
from swarmcli.cli.ending import INTERRUPTS, ExitCode, end_soon, stop_on_signals
from swarmcli.cli.live import LiveView
from swarmcli.cli.site.process import SiteProcess
from swarmcli.errors import BootstrapError, ListenError, MembershipError, NoDonorReachable, UsageError
from swarmcli.events import (
    EpochAdvanced,
    Event,
    MembershipEnded,
    Noticed,
    OwnAddressesChanged,
    PeerConnected,
    PeerDisconnected,
    ReachabilityChanged,
)
from swarmcli.journal import printable
from swarmcli.machine.registry import LocalPeers
from swarmcli.network.addresses import parse_address
from swarmcli.network.transports.tcp.interfaces import announced_addresses
from swarmcli.optim.config import Role
from swarmcli.peer.activity import STAYS
from swarmcli.peer.controls import PeerControls
from swarmcli.peer.home import Home
from swarmcli.peer.neighbours import Neighbours
from swarmcli.peer.peer import RunPeer
from swarmcli.recipe import Recipe
from swarmcli.recipe.link import command_of
from swarmcli.run.alerts import Alerts
from swarmcli.run.observer import Observer
from swarmcli.run.source import DashboardSource, Providers, RunStatus
from swarmcli.run.watch import RunWatch
from swarmcli.training.device import has_card

if TYPE_CHECKING:
    from fastapi import FastAPI

    from coordinator_web.wheel import Wheel

logger = logging.getLogger(__name__)

CHANGE_LINKS = (EpochAdvanced, ReachabilityChanged, OwnAddressesChanged, PeerConnected, PeerDisconnected)
GONE = "The link that was told before no longer holds."
OWN_KEYS = ("local.", "output_dir", "checkpoint.", "network.")  # in which the peers of a run may differ


@contextmanager
def _naming(option: str) -> Iterator[None]:
    """A port that cannot be had is told of with the option that chooses another."""
    try:
        yield
    except ListenError as error:
        raise ListenError(f"{error} ({option} PORT)") from error


def twin_of(role: Role, run_id: str, home: Path) -> str:
    """Reminds a user whose other peer takes part already; "": none does."""
    twins = [each for each in LocalPeers().peers() if (each.role, each.run_id) == (role, run_id)]
    if not twins:
        return ""
    named = ", ".join(f"{Path(each.home).name} (process {each.pid})" for each in twins[:3])
    runs = "runs" if len(twins) == 1 else "run"
    return (
        f"{printable(named)} of yours {runs} already; this is another {role}, {home.name}, and they share this computer"
    )


@dataclass(eq=False)
class Session:
    """A context manager. Entering it joins the run; leaving it says goodbye, and after Ctrl-C exits with 130.

    Inside it the first Ctrl-C or SIGTERM is `swarm stop`: the role hands in what it has computed, then `stop` is set.
    The second sets `stop` at once; the third ends the process.
    """

    role: Role
    recipe: Recipe
    contacts: Sequence[str]
    home: Path | None
    _: KW_ONLY
    port: int = 0  # where this peer listens if the recipe names none; 0: where it did before
    verbose: bool = False
    plain: bool = False
    web_port: int | None = None  # where the dashboard is served; None: nowhere
    web_host: str = "127.0.0.1"
    web_names: Sequence[str] = ()  # under which browsers may ask for it
    wheel: Path | None = None  # the file that it hands out for newcomers to install
    begins_anew: bool = False  # see RunPeer
    process: SiteProcess | None = None  # this one is rank 0 of a site, and asked to stop as such

    def __post_init__(self) -> None:
        self._wheel: Wheel | None = None
        self._web: socket.socket | None = None  # where the page is served, if that was asked for
        self._local: socket.socket | None = None  # where this user's other processes ask; perhaps the same
        self._interrupted = False
        self._parted = False  # its last words were said
        self._expelled = ""  # why the others do not take this peer any more
        self._watch: RunWatch | None = None
        self._view: LiveView | None = None
        self._exit = ExitStack()
        self.stop = threading.Event()

    def __enter__(self) -> Session:
        setup_logging(self.verbose)
        recipe = self.recipe
        for contact in self.contacts:
            parse_address(contact)
        if self.wheel is not None:
            self._wheel = self._read_wheel(self.wheel)
        with ExitStack() as undo:
            self._reserve_web(undo)  # before anybody can meet a peer that would leave at once for want of the port
            home = undo.enter_context(self._claim_home(recipe))
            site = f"a site of {recipe.local.site.processes} processes"
            as_what = site if self.process else self.role
            err.print(
                f"joining the run {recipe.run_id} as {as_what}; my files are in {home.path}",
                soft_wrap=True,
            )
            if self.process is None and (twin := twin_of(self.role, recipe.run_id, home.path)):
                err.print(twin, soft_wrap=True)
            self.peer = RunPeer(
                recipe,
                self.role,
                home,
                contacts=self.contacts,
                port=self.port,
                listener=self._heard,
                begins_anew=self.begins_anew,
            )
            undo.push(self._discard_unused)
            try:
                with _naming("--port"):
                    undo.enter_context(self.peer)
            except BootstrapError as error:
                if self._expelled:  # its first contact said so, and hung up before this peer had met it
                    raise MembershipError(self._expelled) from error
                raise
            self._say_where_it_begins(recipe)
            undo.enter_context(stop_on_signals(self._signalled))
            self._exit = undo.pop_all()
        return self

    def _read_wheel(self, file: Path) -> Wheel:
        from coordinator_web.wheel import Wheel

        if self.web_port is None:
            raise UsageError("--wheel needs the page that hands it out: add --web PORT")
        wheel = Wheel.read(file)
        err.print(f"the page /join hands out {file.name}, SHA-256 {wheel.sha256}", soft_wrap=True)
        return wheel

    def _say_where_it_begins(self, recipe: Recipe) -> None:
        if self.contacts or recipe.network.initial_peers:
            return
        if self.peer.contacts:
            told = "no first contact is given; a peer of this run runs on this computer, and this one joins it there"
        elif self.role != "monitor":
            told = "no first contact is given, so this peer begins a network of its own; others join it"
        else:
            return
        err.print(told, soft_wrap=True)  # in a log it is one line

    def _reserve_web(self, undo: ExitStack) -> None:
        if self.web_port is not None:
            with _naming("--web"):
                self._web = undo.enter_context(closing(listen(self.web_host, self.web_port)))
            if self._web.getsockname()[0] in ("127.0.0.1", "0.0.0.0"):
                self._local = self._web
                return
        try:
            self._local = undo.enter_context(closing(listen("127.0.0.1", 0)))
        except ListenError as error:
            logger.warning("`swarm status`, `pause` and `stop` will not find this peer: %s", error)

    def _claim_home(self, recipe: Recipe) -> Home:
        if self.process and self.process.home:
            return Home(self.process.home, None)
        return Home.at(self.home) if self.home else Home.claim(recipe.output_dir / recipe.run_id, self.role)

    def _discard_unused(self, kind: type[BaseException] | None, *_: object) -> None:
        """A try that failed before it did anything leaves no directory behind."""
        if kind is not None and not self.peer.has_trained:
            self.peer.home.discard()

    def _heard(self, event: Event) -> None:
        """Prints what the view does not show yet, and hears what ends this peer's part."""
        if isinstance(event, Noticed | MembershipEnded) and self._watch is None:
            err.print(printable(event.text if isinstance(event, Noticed) else event.reason, 600), soft_wrap=True)
        if isinstance(event, MembershipEnded):  # the others have hung up: what it computes is nobody's any more
            self._expelled = event.reason
            self.stop.set()

    def _signalled(self, number: signal.Signals, again: bool) -> None:
        self._interrupted = self._interrupted or number in INTERRUPTS
        self.peer.outcome = "stopped by Ctrl-C" if self._interrupted else "asked to stop"
        activity, by_hand = self.peer.activity, number in INTERRUPTS
        # Ctrl-C after `swarm stop` is as good as a second one.
        now = again or (by_hand and activity.status().state == "stopping")
        patience = self.process.patience if self.process else math.inf
        stays = STAYS.asked if number == signal.SIGINT else STAYS.hurried
        status = activity.stop(0.0 if now else min(stays, patience))
        self._hurry(status.keeps)
        if again:
            self._say("leaving after the current step; once more ends it at once, and saves nothing")
        elif now:
            self._say("leaving after the current step")
        elif by_hand:
            self._say(
                "Ctrl-C again or `swarm stop --now` leaves without it"
                if status.keeps
                else "Ctrl-C again leaves at once"
            )

    def _hurry(self, keeps: int) -> None:
        """A peer that has not come into the run leaves without the goodbye if that takes long. `keeps`: samples that it
        has to hand in."""
        if not (keeps or self.peer.has_trained or self.process):
            end_soon(self._say_farewell, ExitCode.INTERRUPTED if self._interrupted else ExitCode.DONE)

    def _say_farewell(self) -> None:
        if not self._parted:
            self._parted = True
            err.show_cursor(True)
            err.print(self._farewell(), soft_wrap=True)

    def _say(self, text: str) -> None:
        if self._view is not None:
            self._view.say(text)
        else:
            err.print(text)

    def show(self) -> RunWatch:
        """Shows the run: on the terminal, and on a dashboard if it has a port. How to join it goes to stdout."""
        watch = self._watch = RunWatch(self.peer, self._join_line())
        self._exit.callback(watch.close)
        controls = PeerControls(
            self.peer.activity,
            self.peer.limits,
            self._asked_to_stop,
            apply=self.peer.governor.look,
            seat=watch.seat,
            has_card=has_card(),
        )
        alerts = Alerts()
        providers = Providers(
            activity=controls.activity,
            limits=controls.limits,
            contributions=self.peer.contributions,
            rests_on=self.peer.rests_on,
            checkpoints=self.peer.home.path / "checkpoints",
            alerts=lambda: alerts.standing,
            machine=Neighbours().look,
        )
        source = DashboardSource(self.peer.journal, watch.look, providers)
        observer = Observer(source.look, self.peer.events, alerts, self.recipe.local.webhook, watch.news)
        self._exit.enter_context(observer)
        address = self._serve(source, controls)
        self._say_how_to_join(watch.look())
        self.peer.tell(address)
        self._exit.callback(self.peer.events.subscribe(lambda event: self._tell_anew(event, address)))
        view = LiveView(
            source.look,
            self.peer.events,
            console=err,
            me=lambda status: source.overview_of(status).me,
            plain=self.plain,
            clock=time.time,
        )
        self._view = self._exit.enter_context(view)
        return watch

    def _serve(self, source: DashboardSource, controls: PeerControls) -> str:
        """Lets this user's other processes ask and control this peer, and shows the page where that was asked for.
        Gives the page's address on this machine, without a token: that is for people, and no file that others read."""
        sockets = [each for each in dict.fromkeys((self._web, self._local)) if each is not None]
        if not sockets:
            return ""
        exposed = self._web is not None and is_exposed(self.web_host, self.web_names)
        control = secrets.token_urlsafe(24)
        # A page that nobody asked for is nobody else's to see, on a computer that several people use.
        token = (
            secrets.token_urlsafe(24) if self._web is None else self.peer.home.dashboard_token() if exposed else None
        )

        def make_app() -> FastAPI:
            from coordinator_web.app import create_app

            hosts = [self.web_host, *self.web_names]
            addresses = self._web_addresses() if exposed else ()
            return create_app(
                source,
                hosts=hosts,
                addresses=addresses,
                wheel=self._wheel,
                token=token,
                controls=controls,
                control_token=control,
            )

        self._exit.enter_context(serving(make_app, sockets))
        if self._local is not None:
            api = f"http://127.0.0.1:{self._local.getsockname()[1]}"
            with suppress(OSError):  # said already, when this peer was entered there
                self.peer.processors.entry.announce(name=self.peer.description.name, api=api, token=control)
        return self._say_where_the_page_is(self._web, token, control) if self._web is not None else ""

    def _say_where_the_page_is(self, web: socket.socket, token: str | None, control: str) -> str:
        """The link on this machine lets its user control the peer; the one for others lets them look."""
        port = web.getsockname()[1]
        address = url_of(self.web_host, port)
        own = control if web is self._local else token
        out.print(f"dashboard: {address}" + (f"?token={own}" if own else ""), soft_wrap=True)
        if is_exposed(self.web_host, self.web_names):
            query = f"?token={token}"
            places = [f"{url}/{query}" for url in self._web_addresses()] + [
                f"{name} with /{query} behind it" for name in self.web_names
            ]
            err.print(f"from other computers: {', '.join(places)}", soft_wrap=True)
            err.print("whoever has that link can look; nothing can be changed there")
        return address

    def _web_addresses(self) -> list[str]:
        """Where other computers find the page, without names that only its operator knows."""
        assert self._web is not None
        port = self._web.getsockname()[1]
        return [each.replace("tcp://", "http://") for each in announced_addresses(self.web_host, port)]

    def _asked_to_stop(self) -> None:
        """By this user's command or page."""
        self.peer.outcome = "asked to stop"
        self._hurry(self.peer.activity.status().keeps)
        self._say("asked to leave by your command or page; Ctrl-C leaves without waiting")

    def _tell_anew(self, event: Event, dashboard: str) -> None:
        """A peer that turns out to be dialable, or moves, or whose contact leaves, has another link or none. This is
        seldom, and the files are small, so they are written here, where the event is heard."""
        if not isinstance(event, CHANGE_LINKS) or not self.peer.has_another_link():
            return
        if not self.peer.tell(dashboard):
            return
        link = self.peer.link()
        told = f"others join from now on with: {command_of(link)}" if link else f"{GONE} {self.peer.no_link}"
        self.peer.events.emit(Noticed("info", told))

    def _say_how_to_join(self, status: RunStatus) -> None:
        """To stdout a line that can be typed; to people what it is worth."""
        if status.link or not self.peer.dht.client_mode:
            out.print(f"join with: {status.join_line}", soft_wrap=True)
        if status.link_reach:
            err.print(printable(status.link_reach, 600), soft_wrap=True)

    def _join_line(self) -> str:
        """The command with which others join by the recipe file, where links are none; what they have to override
        likewise is in it."""
        shared = [word for word in self.recipe.overrides if not word.startswith(OWN_KEYS)]
        addresses = self.peer.dht.get_visible_addresses()[:1]
        words = ["swarm", "join", self.recipe.file]
        words += [part for word in shared for part in ("--set", word)]
        return shlex.join([*words, *(part for address in addresses for part in ("--peer", address))])

    def _farewell(self) -> str:
        summary = self.peer.summary
        work = f" after {summary.samples:,} samples" if self.role == "trainer" else ""
        lost = f"; {summary.lost:,} more are lost, of an epoch that had not ended" if summary.lost else ""
        over = "the run has finished; " if self._watch is not None and self._watch.state == "finished" else ""
        return f"{over}left at epoch {summary.epoch}{work}{lost}; my files are in {self.peer.home.path}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        finished = self._watch is not None and self._watch.state == "finished"
        self._exit.__exit__(kind, error, trace)
        if kind is None or ((self._interrupted or self._expelled) and kind is NoDonorReachable):
            self._say_farewell()
            if said := thanks(self.peer.summary, self.peer.standing):
                err.print(said, soft_wrap=True)
            if self.peer.saved:
                err.print(printable(self.peer.saved, 2000), soft_wrap=True)
            if self._expelled:
                raise MembershipError(self._expelled)
            if self._interrupted and not finished:
                raise typer.Exit(ExitCode.INTERRUPTED)
