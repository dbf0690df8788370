from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from coordinator_web.app import create_app
from coordinator_web.server import DashboardServer
from coordinator_web.source import DashboardSource

Serve = Callable[..., DashboardServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts dashboards on free ports and stops them after the test."""
    servers: list[DashboardServer] = []

    def start(source: DashboardSource, *, port: int = 0, **options: object) -> DashboardServer:
        server = DashboardServer(create_app(source, **options), port=port)  # type: ignore[arg-type]
        servers.append(server)
        server.start_in_thread()
        return server

    yield start
    for server in servers:
        server.stop()
