"""Who answers which method."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from swarmcli.network.wire.messages import MAX_METHOD


@dataclass(frozen=True, slots=True)
class Handler:
    """`answer(peer, request)` returns a struct; for streams `answer(peer, request, stream)` returns nothing."""

    request_type: type[Any]
    answer: Callable[..., Awaitable[Any]]


class Handlers:
    """Those of one endpoint, in two tables. A name belongs to one handler at a time."""

    def __init__(self) -> None:
        self.calls: dict[str, Handler] = {}
        self.streams: dict[str, Handler] = {}

    def add(self, table: dict[str, Handler], name: str, handler: Handler) -> None:
        """`table` is one of the two. Raises ValueError for a name that is taken, or too long for the wire."""
        if not 0 < len(name) <= MAX_METHOD:
            raise ValueError(f"a method's name has 1 to {MAX_METHOD} characters, got {name[:200]!r}")
        if name in self.calls or name in self.streams:
            raise ValueError(f"method {name!r} is served already; withdraw it first")
        table[name] = handler
