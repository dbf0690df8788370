"""Serves the dashboard from within a peer's process, on a loop that is given or in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
from collections.abc import Iterator, Sequence

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator_web.app import create_app
from coordinator_web.source import DashboardSource
from swarmcli.errors import ListenError

GRACE_SECONDS = 2  # for answers under way when the server stops
MAX_CONNECTIONS = 128
REQUEST_SECONDS = 10.0  # in which a request has to come


class _Connection(H11Protocol):
    """uvicorn's, but whoever connects and asks for nothing gives way: each of them takes one of this process's files,
    and uvicorn's own bound counts only those that have asked."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._answered: object = None  # the request that was under way at the last look
        self._look = self.loop.call_later(REQUEST_SECONDS, self._look_again)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._look.cancel()
        super().connection_lost(exc)

    def _look_again(self) -> None:
        if (self.cycle is None or self.cycle.response_complete) and self.cycle is self._answered:
            self.transport.abort()
            return
        self._answered = self.cycle
        self._look = self.loop.call_later(REQUEST_SECONDS, self._look_again)


class _Server(uvicorn.Server):
    """uvicorn, but signals stay with the process that it is part of, and it says when it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepting = threading.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepting.set()


class DashboardServer:
    """One listening port for one app. Serves once: `bind`, then `serve` on a loop or `start_in_thread`, then `stop`."""

    def __init__(
        self, app: FastAPI, *, host: str = "127.0.0.1", port: int = 0, listening: socket.socket | None = None
    ) -> None:
        """`listening`: a socket from `listen`, for a port that was taken before."""
        self._app = app
        self._host = host
        self._port = port
        self._socket = listening
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_Connection,
                ws="none",
                lifespan="off",
                log_config=None,  # logging belongs to the process
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=MAX_CONNECTIONS,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )

    @property
    def url(self) -> str:
        """Where a browser on this machine finds it, once it is bound."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self._host, self._host)
        return f"http://[{host}]:{self._port}/" if ":" in host else f"http://{host}:{self._port}/"

    def bind(self) -> str:
        """Takes the port (0: any free one) and returns the url. Raises ListenError that names host, port and fix."""
        if self._socket is None:
            self._socket = listen(self._host, self._port)
        self._port = self._socket.getsockname()[1]
        return self.url

    async def serve(self) -> None:
        """Serves until `stop` is called or the caller is cancelled; either way no connection is left when it ends."""
        self.bind()
        assert self._socket is not None
        self._loop = asyncio.get_running_loop()
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            self._leave()
            await serving
            raise

    def start_in_thread(self) -> str:
        """Serves on a loop of its own, so that no page can hold up the peer; returns the url once it answers."""
        url = self.bind()
        self._thread = threading.Thread(target=self._run_thread, name="swarm-dashboard", daemon=True)
        self._thread.start()
        self._server.accepting.wait()
        return url

    def _run_thread(self) -> None:
        try:
            asyncio.run(self.serve())
        finally:
            self._server.accepting.set()  # or whoever started us would wait for ever

    def stop(self) -> None:
        """Ends all streams and the server; from any thread but the loop's own, where cancelling `serve` does it.
        With a thread of its own, waits for its end. Idempotent."""
        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop may close between the question and the call
                self._loop.call_soon_threadsafe(self._leave)
        elif self._socket is not None:
            self._socket.close()
        if self._thread is not None:
            self._thread.join()

    def _leave(self) -> None:
        self._app.state.feed.close()  # streams never end by themselves, and uvicorn waits for them
        self._server.should_exit = True


@contextlib.contextmanager
def serving(
    source: DashboardSource,
    host: str,
    listening: socket.socket,
    *,
    names: Sequence[str] = (),
    token: str | None = None,
) -> Iterator[str]:
    """Serves the dashboard on a socket that listens at `host` while the block lasts; gives its address, without the
    token. `names`: under which browsers may ask for it beside `host`. `token`: that everybody has to bring; see
    `guard.is_exposed`."""
    server = DashboardServer(create_app(source, hosts=[host, *names], token=token), host=host, listening=listening)
    url = server.start_in_thread()
    try:
        yield url
    finally:
        server.stop()


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
