"""Serves the dashboard from within a peer's process; `background` runs it in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from swarmcli.network.addresses import Scope, scope_of


@dataclass(frozen=True, slots=True)
class ServerBounds:
    """Each connection takes one of this process's file descriptors."""

    connections: int = 128
    visitors: int = 96  # from other computers: however many come, the user can still pause and stop the peer
    request_seconds: float = 10.0  # in which a request has to come, and the other end has to take some of an answer
    grace_seconds: int = 2  # for answers under way when the server stops


BOUNDS = ServerBounds()


class _Connection(H11Protocol):
    """uvicorn's protocol, which also hangs up on a visitor that connects and asks for nothing, or that takes nothing of
    the answer: uvicorn's own bound counts only connections that have asked."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._answered: object = None  # the request that was under way at the last look
        self._untaken = 0  # bytes of an answer that waited for the other end at the last look; 0: none
        self._look = self.loop.call_later(BOUNDS.request_seconds, self._look_again)
        self.is_visitor = not _is_of_this_computer(self.client)
        visitors = sum(each.is_visitor for each in self.connections if isinstance(each, _Connection))
        if len(self.connections) > BOUNDS.connections or (self.is_visitor and visitors > BOUNDS.visitors):
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
        self._look = self.loop.call_later(BOUNDS.request_seconds, self._look_again)


def _is_of_this_computer(client: tuple[str, int] | None) -> bool:
    return client is not None and scope_of(client[0]) is Scope.HOST


class _Server(uvicorn.Server):
    """uvicorn's server, but the process keeps its own signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(app: FastAPI, sockets: Sequence[socket.socket]) -> None:
    """Serves at these ports until the caller is cancelled; no connection is left when it ends. Closes the sockets."""
    server = _Server(
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
            limit_concurrency=BOUNDS.connections,
            timeout_graceful_shutdown=BOUNDS.grace_seconds,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=list(sockets)))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving
        raise
