"""The dashboard inside a role's process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from swarmcli.roles.journal_source import JournalSource
from swarmcli.roles.peer import RunPeer
from swarmcli.roles.watch import RunWatch


@contextmanager
def dashboard(peer: RunPeer, watch: RunWatch, host: str, listening: socket.socket) -> Iterator[str]:
    """Serves the dashboard on a socket that listens at `host` while the block lasts; gives its address.

    On another interface than loopback the page is open to whoever reaches it: it changes nothing.
    """
    from coordinator_web.app import create_app
    from coordinator_web.server import DashboardServer

    server = DashboardServer(
        create_app(JournalSource(peer.journal, watch.status), hosts=[host]), host=host, listening=listening
    )
    url = server.start_in_thread()
    try:
        yield url
    finally:
        server.stop()
