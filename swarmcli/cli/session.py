"""What `join`, `aux` and `monitor` have in common around their role: recipe, home, network, signals, live view."""

from __future__ import annotations

import shlex
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import TracebackType

import typer

from coordinator_web.source import DashboardSource, RunStatus
from swarmcli.cli.console import err, out, setup_logging
from swarmcli.cli.ending import INTERRUPTS, ExitCode, stop_on_signals
from swarmcli.cli.live import LiveView
from swarmcli.cli.site.process import SiteProcess
from swarmcli.errors import ListenError, MembershipError, NoDonorReachable
from swarmcli.events import (
    Event,
    MembershipEnded,
    Noticed,
    OwnAddressesChanged,
    PeerConnected,
    PeerDisconnected,
    ReachabilityChanged,
)
from swarmcli.journal import printable
from swarmcli.network.addresses import parse_address
from swarmcli.network.transports.tcp.interfaces import announced_addresses
from swarmcli.optim.config import Role
from swarmcli.recipe import Recipe
from swarmcli.roles.home import Home
from swarmcli.roles.peer import RunPeer
from swarmcli.roles.watch import RunWatch, command_of

CHANGE_LINKS = (ReachabilityChanged, OwnAddressesChanged, PeerConnected, PeerDisconnected)
GONE = "The link that was told before no longer holds."
OWN_KEYS = ("local.", "output_dir", "checkpoint.", "network.")  # in which the peers of a run may differ


@contextmanager
def _naming(option: str) -> Iterator[None]:
    """A port that cannot be had is told of with the option that chooses another."""
    try:
        yield
    except ListenError as error:
        raise ListenError(f"{error} ({option} PORT)") from error


class Session:
    """A context manager. Entering it joins the run; leaving it says goodbye, and after Ctrl-C exits with 130.

    Inside it the first Ctrl-C or SIGTERM sets `stop`, the second ends the process at once.
    """

    def __init__(
        self,
        role: Role,
        recipe: Recipe,
        contacts: Sequence[str],
        home: Path | None,
        *,
        port: int = 0,
        verbose: bool = False,
        web_port: int | None = None,
        web_host: str = "127.0.0.1",
        web_names: Sequence[str] = (),
        process: SiteProcess | None = None,
    ) -> None:
        """`port`: where this peer listens if the recipe names none; 0: where it did before. `web_port`: where the
        dashboard is served; None: nowhere. `web_names`: under which browsers may ask for it. `process`: this one is
        rank 0 of a site, and asked to stop as such."""
        self._role = role
        self._recipe = recipe
        self._contacts = contacts
        self._home = home
        self._port = port
        self._verbose = verbose
        self._web_port = web_port
        self._web_host = web_host
        self._web_names = tuple(web_names)
        self._web: socket.socket | None = None
        self._process = process
        self._interrupted = False
        self._expelled = ""  # why this peer is no member of its closed run any more
        self._watch: RunWatch | None = None
        self._exit = ExitStack()
        self.stop = threading.Event()

    def __enter__(self) -> Session:
        setup_logging(self._verbose)
        recipe = self._recipe
        for contact in self._contacts:
            parse_address(contact)
        with ExitStack() as undo:
            self._reserve_web(undo)  # before anybody can meet a peer that would leave at once for want of the port
            home = undo.enter_context(self._claim_home(recipe))
            err.print(
                f"joining the run {recipe.run_id} as {self._as_what(recipe)}; my files are in {home.path}",
                soft_wrap=True,
            )
            self.peer = RunPeer(
                recipe, self._role, home, contacts=self._contacts, port=self._port, listener=self._heard
            )
            undo.push(self._discard_unused)
            with _naming("--port"):
                undo.enter_context(self.peer)
            if not self.peer.contacts and self._role != "monitor":
                err.print("no first contact is given, so this peer begins a network of its own; others join it")
            if self._process:
                undo.enter_context(self._process.stopping(self.stop, self._first_signal))
            else:
                undo.enter_context(stop_on_signals(self.stop, on_first=self._first_signal))
            self._exit = undo.pop_all()
        return self

    def _reserve_web(self, undo: ExitStack) -> None:
        if self._web_port is None:
            return
        from coordinator_web.server import listen

        with _naming("--web"):
            self._web = undo.enter_context(closing(listen(self._web_host, self._web_port)))

    def _claim_home(self, recipe: Recipe) -> Home:
        """A site that was started anew takes up the home of its life before, and with it the peer's identity."""
        before = self._process.past.home if self._process else ""
        path = self._home or (Path(before) if before else None)
        home = Home.at(path) if path else Home.claim(recipe.output_dir / recipe.run_id, self._role)
        if self._process:
            self._process.note_home(home.path)
        return home

    def _discard_unused(self, kind: type[BaseException] | None, *_: object) -> None:
        """A try that failed before it did anything leaves no directory behind."""
        if kind is not None and not self.peer.has_trained:
            self.peer.home.discard()

    def _as_what(self, recipe: Recipe) -> str:
        return f"a site of {recipe.local.site.processes} processes" if self._process else self._role

    def _heard(self, event: Event) -> None:
        """What people should know before there is a view that shows it, and what ends this peer's part."""
        if isinstance(event, Noticed) and self._watch is None:
            err.print(printable(event.text), soft_wrap=True)
        if isinstance(event, MembershipEnded):  # the others have hung up: what it computes is nobody's any more
            self._expelled = event.reason
            self.stop.set()

    def _first_signal(self, number: signal.Signals) -> None:
        self._interrupted = number in INTERRUPTS
        self.peer.outcome = "stopped by Ctrl-C" if self._interrupted else "asked to stop"
        err.print("stopping after the current step; once more to stop at once")

    def show(self) -> RunWatch:
        """Shows the run: on the terminal, and on a dashboard if it has a port. How to join it goes to stdout."""
        watch = self._watch = RunWatch(self.peer, self._join_line())
        self._exit.callback(watch.close)
        address = ""
        if self._web is not None:
            address = self._serve_dashboard(DashboardSource(self.peer.journal, watch.look), self._web)
        self._say_how_to_join(watch.look())
        self.peer.tell(address)
        self._exit.callback(self.peer.events.subscribe(lambda event: self._tell_anew(event, address)))
        self._exit.enter_context(LiveView(watch.look, self.peer.events, console=err, clock=time.time))
        return watch

    def _serve_dashboard(self, source: DashboardSource, listening: socket.socket) -> str:
        """Gives its address on this machine, without the token: that is for people, and no file that others read."""
        from coordinator_web.guard import is_exposed
        from coordinator_web.server import serving

        exposed = is_exposed(self._web_host, self._web_names)
        token = self.peer.home.dashboard_token() if exposed else None
        address = self._exit.enter_context(
            serving(source, self._web_host, listening, names=self._web_names, token=token)
        )
        query = f"?token={token}" if token else ""
        out.print(f"dashboard: {address}{query}", soft_wrap=True)
        if exposed:
            port = listening.getsockname()[1]
            urls = [each.replace("tcp://", "http://") for each in announced_addresses(self._web_host, port)]
            places = [f"{url}/{query}" for url in urls] + [
                f"{name} with /{query} behind it" for name in self._web_names
            ]
            err.print(f"from other computers: {', '.join(places)}", soft_wrap=True)
            err.print("whoever has that link can look; nothing can be changed there")
        return address

    def _tell_anew(self, event: Event, dashboard: str) -> None:
        """A peer that turns out to be dialable, or moves, or whose contact leaves, has another link or none. This is
        seldom, and the files are small, so they are written here, where the event is heard."""
        if not isinstance(event, CHANGE_LINKS) or not self.peer.has_another_link():
            return
        self.peer.tell(dashboard)
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
        shared = [word for word in self._recipe.overrides if not word.startswith(OWN_KEYS)]
        addresses = self.peer.dht.get_visible_addresses()[:1]
        words = ["swarm", "join", self._recipe.file]
        words += [part for word in shared for part in ("--set", word)]
        return shlex.join([*words, *(part for address in addresses for part in ("--peer", address))])

    def _farewell(self) -> str:
        summary = self.peer.summary
        work = f" after {summary.samples:,} samples" if self._role == "trainer" else ""
        return f"left at epoch {summary.epoch}{work}; my files are in {self.peer.home.path}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        finished = self._watch is not None and self._watch.state == "finished"
        self._exit.__exit__(kind, error, trace)
        if kind is None or (self._interrupted and kind is NoDonorReachable):
            err.print(self._farewell(), soft_wrap=True)
            if self.peer.saved:
                err.print(printable(self.peer.saved, 2000), soft_wrap=True)
            if self._expelled:
                raise MembershipError(self._expelled)
            if self._interrupted and not finished:
                raise typer.Exit(ExitCode.INTERRUPTED)
