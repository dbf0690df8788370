"""What `join`, `aux` and `monitor` have in common around their role: recipe, home, network, signals, live view."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import typer

from swarmcli.cli.console import err, out, setup_logging
from swarmcli.cli.live import LiveView
from swarmcli.cli.options import claim_home
from swarmcli.optim.report import Role
from swarmcli.recipe import load_recipe
from swarmcli.roles.dashboard import dashboard
from swarmcli.roles.peer import RunPeer
from swarmcli.roles.watch import RunWatch
from swarmcli.training.interrupt import stop_on_signals

INTERRUPTED = 130


class Session:
    """A context manager. Entering it joins the run; leaving it says goodbye, and after Ctrl-C exits with 130.

    Inside it the first Ctrl-C or SIGTERM sets `stop`, the second ends the process at once.
    """

    def __init__(
        self,
        role: Role,
        recipe: Path,
        overrides: Sequence[str],
        contacts: Sequence[str],
        home: Path | None,
        *,
        default_port: int = 0,
        verbose: bool = False,
    ) -> None:
        self._role = role
        self._recipe_path = recipe
        self._overrides = overrides
        self._contacts = contacts
        self._home = home
        self._default_port = default_port
        self._verbose = verbose
        self._interrupted = False
        self._exit = ExitStack()
        self.stop = threading.Event()

    def __enter__(self) -> Session:
        setup_logging(self._verbose)
        recipe = load_recipe(self._recipe_path, self._overrides)
        if "port" not in recipe.local.model_fields_set and self._default_port:
            recipe = load_recipe(self._recipe_path, [*self._overrides, f"local.port={self._default_port}"])
        with ExitStack() as undo:
            home = undo.enter_context(claim_home(recipe, self._role, self._home))
            err.print(f"joining the run {recipe.run_id} as {self._role}; my files are in {home.path}")
            self.peer = undo.enter_context(RunPeer(recipe, self._role, home, contacts=self._contacts))
            undo.enter_context(stop_on_signals(self.stop, on_first=self._first_signal))
            self._exit = undo.pop_all()
        return self

    def _first_signal(self, number: signal.Signals) -> None:
        self._interrupted = number == signal.SIGINT
        err.print("stopping after the current step; once more to stop at once")

    def show(self, web_port: int | None = None, web_host: str = "127.0.0.1") -> RunWatch:
        """Shows the run: on the terminal, and on a dashboard if a port is given. How to join it goes to stdout."""
        watch = RunWatch(self.peer, self.peer.join_line(str(self._recipe_path)))
        self._exit.callback(watch.close)
        address = ""
        if web_port is not None:
            address = self._exit.enter_context(dashboard(self.peer, watch, web_host, web_port))
            out.print(f"dashboard: {address}", soft_wrap=True)
        if not self.peer.dht.client_mode:
            out.print(f"join with: {watch.join_line}", soft_wrap=True)
        self.peer.tell(address)
        self._exit.enter_context(LiveView(watch.status, self.peer.events, console=err, clock=time.time))
        return watch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()
        if kind is None and self._interrupted:
            raise typer.Exit(INTERRUPTED)
