"""A dashboard that is served while a test asks it."""

from __future__ import annotations

from contextlib import ExitStack

from fastapi import FastAPI

from coordinator_web.background import listen, serving, url_of


class Dashboard:
    """Serves from its making until `stop`."""

    def __init__(self, app: FastAPI, *, host: str = "127.0.0.1", port: int = 0) -> None:
        listener = listen(host, port)
        self.host = listener.getsockname()[0]
        self.port: int = listener.getsockname()[1]
        self.url = url_of(host, self.port)
        self._ends = ExitStack()
        self._ends.enter_context(serving(lambda: app, [listener]))

    def stop(self) -> None:
        self._ends.close()
