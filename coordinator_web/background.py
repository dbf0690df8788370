"""Takes the ports of a peer's dashboard, and serves it in a thread of its own.

The thread also loads the web framework, so the peer does not wait half a second for it. The ports are taken before
that, so a request that comes meanwhile is answered a moment later.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from swarmcli.errors import ListenError
from swarmcli.network.addresses import Scope, scope_of

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger(__name__)


def is_exposed(host: str, names: Sequence[str]) -> bool:
    """Whether others than this machine's users may reach a dashboard that listens at this host: then it needs a token.
    With names it counts as exposed, since a proxy passes on requests for them."""
    if names:
        return True
    return host.lower() != "localhost" and scope_of(host) is not Scope.HOST


def url_of(host: str, port: int) -> str:
    """Returns the address at which a browser on this machine finds what listens there."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def listen(host: str, port: int) -> socket.socket:
    """Takes the port (0: any free one). Raises ListenError that names host, port and the fix."""
    if not 0 <= port <= 65535:
        raise ListenError(f"the dashboard cannot listen on {host}:{port}: a port is a number from 0 to 65535")
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ListenError(f"the dashboard cannot listen on {host}:{port}: {_why(error)}") from error


def _why(error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return "another program has this port; choose another one, or 0 for any that is free"
        case errno.EACCES:
            return "this port is reserved for the system; choose one above 1023, or 0 for any that is free"
        case errno.EADDRNOTAVAIL | socket.EAI_NONAME:
            return "this machine has no such address; use 127.0.0.1, or 0.0.0.0 for all of its addresses"
        case _:
            return str(error)


@contextmanager
def serving(make_app: Callable[[], FastAPI], sockets: Sequence[socket.socket]) -> Iterator[None]:
    """Serves what `make_app` makes, called in the thread, while the block lasts, and closes the sockets. An error is
    logged once, and all else goes on."""
    server = _Background(make_app, sockets)
    thread = threading.Thread(target=server.run, name="swarm-dashboard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.stop()
        thread.join()


class _Background:
    def __init__(self, make_app: Callable[[], FastAPI], sockets: Sequence[socket.socket]) -> None:
        self._make_app = make_app
        self._sockets = sockets
        self._lock = threading.Lock()  # a stop while the framework is loaded waits for the end of the loading
        self._over = False
        self._wake: Callable[[], object] = lambda: None

    def run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            logger.warning("this peer serves no dashboard, and `swarm status` cannot ask it: %s", error)
        finally:
            for each in self._sockets:
                each.close()

    async def _serve(self) -> None:
        from coordinator_web.server import serve

        loop = asyncio.get_running_loop()
        with self._lock:
            if self._over:
                return
            serving = asyncio.create_task(serve(self._make_app(), self._sockets))
            self._wake = lambda: loop.call_soon_threadsafe(serving.cancel)
        with suppress(asyncio.CancelledError):
            await serving

    def stop(self) -> None:
        with self._lock:
            self._over = True
        with suppress(RuntimeError):  # the loop has ended by itself
            self._wake()
