"""Posts alerts as JSON to an address that the owner names: each once, tried again a few times if nobody answers.

Only https, or http to this computer; no redirect is followed, since it would lead elsewhere than the owner said. What
goes out tells of the run and holds no key, token, link or address. The address itself is often a password, so nothing
of it but the host is ever shown.
"""

from __future__ import annotations

import http.client
import json
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

RETRY_AFTER = (2.0, 10.0, 60.0, 300.0)  # seconds
AGAIN = (408, 425, 429)  # answers, beside those from 500 on, after which trying again may help


class Webhook:
    """A thread that posts, from the first alert until `close`."""

    def __init__(
        self, address: str, notice: Callable[[str], None], *, retry_after: tuple[float, ...] = RETRY_AFTER
    ) -> None:
        """`address`: as `local.webhook` allows it. `notice` is told why an alert could not be delivered."""
        self._parts = urlsplit(address)
        self._notice = notice
        self._retry_after = retry_after
        self._waiting: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()  # alerts are rare
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def post(self, message: Mapping[str, Any]) -> None:
        """Never blocks and never fails."""
        self._waiting.put(message)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="swarm-webhook", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread, at the latest when the request under way is over; alerts that wait are not sent."""
        self._closing.set()
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(2.0)  # a daemon: a peer that leaves waits for nobody's server

    def _run(self) -> None:
        while not self._closing.is_set() and (message := self._waiting.get()) is not None:
            failure = self._deliver(json.dumps(message).encode())
            if failure:
                self._notice(f"an alert could not be sent to {self._parts.hostname}: {failure}")

    def _deliver(self, body: bytes) -> str:
        """Returns why the alert has not arrived; "": it has."""
        for wait in (*self._retry_after, None):
            failure, again = self._try(body)
            if not failure or not again or wait is None or self._closing.wait(wait):
                return failure
        return ""

    def _try(self, body: bytes) -> tuple[str, bool]:
        """Returns what went wrong, and whether another try may help."""
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=10.0)
        path = (self._parts.path or "/") + (f"?{self._parts.query}" if self._parts.query else "")
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json", "User-Agent": "swarm"})
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException, ValueError) as error:
            return f"{type(error).__name__}", not isinstance(error, ValueError)
        finally:
            connection.close()
        if 200 <= status < 300:
            return "", False
        if 300 <= status < 400:
            return "it answers with a redirect; give the address to which that leads", False
        return f"it answers with status {status}", status >= 500 or status in AGAIN
