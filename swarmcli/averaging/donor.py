"""Gives this peer's state to others, from a snapshot that does not hold up the training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

import msgspec

from swarmcli.averaging.snapshot import MAX_VERSION, PinnedState, Snapshot
from swarmcli.errors import CallRefused, EndOfStream
from swarmcli.network import Endpoint, PeerID, Stream
from swarmcli.network.thread import offload

MAX_CHUNKS_AT_ONCE = 64  # of one request

_LINGER = 5.0  # seconds for which a snapshot is kept after its last download: newcomers tend to come together
_PATIENCE = 60.0  # seconds for which a downloader may ask nothing, or read nothing


class StateRequest(msgspec.Struct, frozen=True):
    """Opens a download. `version` is b"" for whatever the donor has."""

    version: Annotated[bytes, msgspec.Meta(max_length=MAX_VERSION)]


class ManifestHeader(msgspec.Struct, frozen=True):
    """The donor's first message; the manifest is its payload."""


class ChunkRequest(msgspec.Struct, frozen=True):
    """Asks for chunks `first` to `first + count - 1`. Several requests may be under way."""

    first: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNKS_AT_ONCE)]


class ChunkHeader(msgspec.Struct, frozen=True):
    """In front of each chunk, in the order in which they were asked for."""

    chunk: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


def state_method(prefix: str) -> str:
    """The name of the stream method on the wire."""
    return f"state.{prefix}"


@dataclass(eq=False)
class _Pin:
    """A snapshot while downloads use it, and a little longer."""

    state: PinnedState
    made: float  # loop time
    users: int = 0


class StateDonor:
    """Serves downloads of one prefix. Several of them share one snapshot."""

    def __init__(
        self,
        endpoint: Endpoint,
        prefix: str,
        provide: Callable[[bytes], Awaitable[Snapshot | None]],
        *,
        max_downloads: int = 4,
        donated: Callable[[PeerID, Snapshot, int], None] | None = None,
    ) -> None:
        """`provide(version)` gives a snapshot of that version (b"": of the newest), or None if it is not here.
        `donated` is called after each download with who got how many bytes of what."""
        self._endpoint, self._method = endpoint, state_method(prefix)
        self._provide, self._donated = provide, donated
        self._max_downloads = max_downloads
        self._downloads = 0
        self._pins: dict[bytes, _Pin] = {}  # by the version that was asked for
        self._pinning = asyncio.Lock()
        self._closed = False

    def start(self) -> None:
        """Begins to answer. Raises ValueError if this endpoint has a donor of the prefix already."""
        self._endpoint.serve_stream(self._method, StateRequest, self._serve)

    def close(self) -> None:
        """Takes no more downloads and lets go of the snapshots; downloads under way go on. Idempotent."""
        if not self._closed:
            self._closed = True
            self._endpoint.withdraw(self._method)
            self._pins.clear()

    async def _serve(self, peer: PeerID, request: StateRequest, stream: Stream) -> None:
        if self._downloads >= self._max_downloads:
            raise CallRefused("busy", f"{self._downloads} others are downloading from this peer")
        self._downloads += 1
        try:
            async with self._pin(request.version) as state:
                await self._give(state, stream)
        finally:
            self._downloads -= 1
        if self._donated is not None and stream.bytes_sent > len(state.manifest):
            self._donated(peer, state.snapshot, stream.bytes_sent)

    async def _give(self, state: PinnedState, stream: Stream) -> None:
        async with asyncio.timeout(_PATIENCE):
            await stream.send(ManifestHeader(), state.manifest)
        while True:
            try:
                async with asyncio.timeout(_PATIENCE):
                    request, _ = await stream.receive(ChunkRequest)
            except EndOfStream:
                return
            if request.first + request.count > state.layout.chunks:
                raise CallRefused("chunk", f"this state has {state.layout.chunks} chunks")
            for chunk in range(request.first, request.first + request.count):
                async with asyncio.timeout(_PATIENCE):
                    await stream.send(ChunkHeader(chunk), state.chunk(chunk))

    @asynccontextmanager
    async def _pin(self, version: bytes) -> AsyncIterator[PinnedState]:
        async with self._pinning:
            pin = self._pins.get(version)
            if pin is None or (not version and _now() - pin.made > _LINGER):  # "the newest" does not stay the newest
                pin = _Pin(await self._prepare(version), _now())
                if not self._closed:
                    self._pins[version] = pin
            pin.users += 1
        try:
            yield pin.state
        finally:
            pin.users -= 1
            if not pin.users and self._pins.get(version) is pin:
                asyncio.get_running_loop().call_later(_LINGER, self._unpin, version, pin)

    async def _prepare(self, version: bytes) -> PinnedState:
        snapshot = await self._provide(version)
        if snapshot is None:
            raise CallRefused("version", "this peer does not have that state")
        return await offload(PinnedState, snapshot)

    def _unpin(self, version: bytes, pin: _Pin) -> None:
        if not pin.users and self._pins.get(version) is pin:
            del self._pins[version]


def _now() -> float:
    return asyncio.get_running_loop().time()
