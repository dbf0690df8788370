"""Serves a peer's page and its API: always for this user's processes, and for browsers where a person asks for it."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator_web.background import is_exposed, listen, serving, url_of
from swarmcli.cli.console import err, out
from swarmcli.errors import ListenError, UsageError
from swarmcli.network.transports.tcp.interfaces import announced_addresses
from swarmcli.peer.controls import PeerControls
from swarmcli.peer.peer import RunPeer
from swarmcli.run.source import DashboardSource

if TYPE_CHECKING:
    from fastapi import FastAPI

    from coordinator_web.wheel import Wheel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PageOptions:
    """Where a person wants to see the page."""

    port: int | None = None  # None: no page for browsers
    host: str = "127.0.0.1"
    names: Sequence[str] = ()  # host names under which browsers may ask for it
    wheel: Path | None = None  # the file that the page hands out for newcomers to install


@contextmanager
def naming(option: str) -> Iterator[None]:
    """If a port cannot be had, the error names the option that chooses another."""
    try:
        yield
    except ListenError as error:
        raise ListenError(f"{error} ({option} PORT)") from error


class PagePorts:
    """The ports, taken before anybody can meet the peer: without them it would leave at once. A context manager."""

    def __init__(self, options: PageOptions) -> None:
        """Raises ListenError, UsageError."""
        self._options = options
        self._wheel = self._read_wheel(options)
        self._exit = ExitStack()
        self._web: socket.socket | None = None  # for browsers
        self._local: socket.socket | None = None  # for this user's other processes; perhaps the same socket
        if options.port is not None:
            with naming("--web"):
                self._web = self._exit.enter_context(closing(listen(options.host, options.port)))
            if self._web.getsockname()[0] in ("127.0.0.1", "0.0.0.0"):
                self._local = self._web
        if self._local is None:
            try:
                self._local = self._exit.enter_context(closing(listen("127.0.0.1", 0)))
            except ListenError as error:
                logger.warning("`swarm status`, `pause` and `stop` will not find this peer: %s", error)

    @staticmethod
    def _read_wheel(options: PageOptions) -> Wheel | None:
        if options.wheel is None:
            return None
        from coordinator_web.wheel import Wheel

        if options.port is None:
            raise UsageError("--wheel needs the page that hands it out: add --web PORT")
        wheel = Wheel.read(options.wheel)
        err.print(f"the page /join hands out {options.wheel.name}, SHA-256 {wheel.sha256}", soft_wrap=True)
        return wheel

    def __enter__(self) -> PagePorts:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    @contextmanager
    def served(self, peer: RunPeer, source: DashboardSource, controls: PeerControls) -> Iterator[str]:
        """Lets this user's other processes ask and control this peer, and shows the page if that was asked for. Yields
        the page's address on this machine, without a token, since files that others may read get it."""
        sockets = [each for each in dict.fromkeys((self._web, self._local)) if each is not None]
        exposed = self._web is not None and is_exposed(self._options.host, self._options.names)
        control = secrets.token_urlsafe(24)
        # If nobody asked for a page, other users of this computer may not see one.
        token = secrets.token_urlsafe(24) if self._web is None else peer.home.dashboard_token() if exposed else None

        def make_app() -> FastAPI:
            from coordinator_web.app import create_app

            return create_app(
                source,
                hosts=[self._options.host, *self._options.names],
                addresses=self._addresses() if exposed else (),
                wheel=self._wheel,
                token=token,
                controls=controls,
                control_token=control,
            )

        with serving(make_app, sockets):
            if self._local is not None:
                api = f"http://127.0.0.1:{self._local.getsockname()[1]}"
                with suppress(OSError):  # a warning said so already, when this peer was entered in the registry
                    peer.processors.entry.announce(name=peer.description.name, api=api, token=control)
            yield self._say_where(self._web, token, control) if self._web is not None else ""

    def _say_where(self, web: socket.socket, token: str | None, control: str) -> str:
        """Prints the links. The one for this machine lets its user control the peer; the one for other computers lets
        them look."""
        address = url_of(self._options.host, web.getsockname()[1])
        own = control if web is self._local else token
        out.print(f"dashboard: {address}" + (f"?token={own}" if own else ""), soft_wrap=True)
        if is_exposed(self._options.host, self._options.names):
            query = f"?token={token}"
            places = [f"{url}/{query}" for url in self._addresses()] + [
                f"{name} with /{query} after it" for name in self._options.names
            ]
            err.print(f"from other computers: {', '.join(places)}", soft_wrap=True)
            err.print("whoever has that link can look; nothing can be changed there")
        return address

    def _addresses(self) -> list[str]:
        """Returns where other computers find the page, without names that only its operator knows."""
        assert self._web is not None
        port = self._web.getsockname()[1]
        return [each.replace("tcp://", "http://") for each in announced_addresses(self._options.host, port)]
