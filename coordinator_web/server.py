"""Serves the dashboard from within a peer's process, on a loop that is given or in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
from collections.abc import Iterator, Sequence

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator_web.ports import listen, url_of

GRACE_SECONDS = 2  # for answers under way when the server stops
MAX_CONNECTIONS = 128
MAX_VISITORS = 96  # of them from other computers: however many come, this computer's user can pause and stop the peer
REQUEST_SECONDS = 10.0  # in which a request has to come, and some of an answer that waits has to be taken


class _Connection(H11Protocol):
    """uvicorn's, but whoever connects and asks for nothing gives way, and so does who takes nothing of the answer: each
    of them takes one of this process's files, and uvicorn's own bound counts only those that have asked."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._answered: object = None  # the request that was under way at the last look
        self._untaken = 0  # bytes of an answer that waited for the other end then; 0: none did
        self._look = self.loop.call_later(REQUEST_SECONDS, self._look_again)
        self.is_visitor = not _is_of_this_computer(self.client)
        visitors = sum(each.is_visitor for each in self.connections if isinstance(each, _Connection))
        if len(self.connections) > MAX_CONNECTIONS or (self.is_visitor and visitors > MAX_VISITORS):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._look.cancel()
        super().connection_lost(exc)

    def _look_again(self) -> None:
        asks_nothing = (self.cycle is None or self.cycle.response_complete) and self.cycle is self._answered
        untaken = self.transport.get_write_buffer_size() if self.flow.write_paused else 0
        if asks_nothing or (untaken and untaken == self._untaken):
            self.transport.abort()
            return
        self._answered, self._untaken = self.cycle, untaken
        self._look = self.loop.call_later(REQUEST_SECONDS, self._look_again)


def _is_of_this_computer(client: tuple[str, int] | None) -> bool:
    """Not so for what cannot be told."""
    try:
        address = ipaddress.ip_address(client[0] if client else "")
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


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
        self, app: FastAPI, *, host: str = "127.0.0.1", port: int = 0, sockets: Sequence[socket.socket] = ()
    ) -> None:
        """`sockets`: from `listen`, for ports that were taken before; then `host` and `port` say nothing."""
        self._app = app
        self._host = host
        self._port = port
        self._sockets = list(sockets)
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
        return url_of(self._host, self._port)

    def bind(self) -> str:
        """Takes the port (0: any free one) and returns the url. Raises ListenError that names host, port and fix."""
        if not self._sockets:
            self._sockets = [listen(self._host, self._port)]
        self._port = self._sockets[0].getsockname()[1]
        return self.url

    async def serve(self) -> None:
        """Serves until `stop` is called or the caller is cancelled; either way no connection is left when it ends."""
        self.bind()
        self._loop = asyncio.get_running_loop()
        serving = asyncio.create_task(self._server.serve(sockets=self._sockets))
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
        else:
            for each in self._sockets:
                each.close()
        if self._thread is not None:
            self._thread.join()

    def _leave(self) -> None:
        self._app.state.feed.close()  # streams never end by themselves, and uvicorn waits for them
        self._server.should_exit = True
