"""Gives this peer's state to newcomers, from a snapshot that does not hold up the training.

A few peers download at a time. The others wait in line, and the donor tells them which peers have the state by now, so
newcomers download from each other too, and a donor's line is not cut into ever thinner slices. A free place goes to the
network that has the fewest. While peers wait in line, a downloader that takes next to nothing gives way.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch

from swarmcli.concurrency import Bell, beside, unless_stuck
from swarmcli.errors import CallRefused, EndOfStream, SiteError
from swarmcli.network import Endpoint, PeerID, Stream
from swarmcli.network.loop_thread import loop_time, offload
from swarmcli.network.prefix import Prefix
from swarmcli.state.pins import Pin, Pins, gone
from swarmcli.state.snapshot import MAX_VERSION, PinnedState, Snapshot
from swarmcli.state.witnesses import RootAnswer, RootQuestion, root_method

LIBRARY = f"torch {torch.__version__.partition('+')[0]}"  # that made this peer's states; told when they do not fit
MAX_CHUNKS_AT_ONCE = 64  # of one request
MAX_NAMED = 8  # other holders of the state in one message

MOST_IN_LINE = 256  # downloaders that wait
MOST_VERSIONS = 2  # given at once, besides those lent: each may take as much memory as the state
LEAST_TAKEN = 20 << 10  # bytes in PATIENCE, less than half of what a line of 10 kB/s takes from each of four donors
# Seconds
SIGN_OF_LIFE = 10.0  # between messages to those in line
PATIENCE = 20.0  # for which a downloader may take nothing; or, while others wait, less than LEAST_TAKEN
BETWEEN_ROOTS = 5.0  # between two states that are copied only to be hashed
COURTESY = 2.0  # at most, for which a chunk waits until this peer does not need its line for itself


class StateRequest(msgspec.Struct, frozen=True):
    """Opens a download. `version` is b"" for whatever the donor has."""

    version: Annotated[bytes, msgspec.Meta(max_length=MAX_VERSION)]


class Holder(msgspec.Struct, frozen=True):
    """A peer that has downloaded a state, and where it can be dialed."""

    peer_id: PeerID
    addresses: tuple[str, ...]


class InLine(msgspec.Struct, frozen=True, tag=True):
    """The donor sends this now and then to a downloader in its line: which other peers have the state."""

    others: Annotated[tuple[Holder, ...], msgspec.Meta(max_length=MAX_NAMED)] = ()


class ManifestHeader(msgspec.Struct, frozen=True, tag=True):
    """The donor sends this when the downloader's turn has come, with the manifest as the payload. `library`: what made
    the donor's states."""

    library: Annotated[str, msgspec.Meta(max_length=64)] = ""


class ChunkRequest(msgspec.Struct, frozen=True):
    """Asks for chunks `first` to `first + count - 1`. Several requests may be under way."""

    first: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNKS_AT_ONCE)]


class ChunkHeader(msgspec.Struct, frozen=True):
    """Sent before each chunk, in the order in which chunks were asked for."""

    chunk: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


@dataclass(eq=False)
class _Ticket:
    """A download, in line or under way."""

    network: Prefix | None  # None: its control connection has ended
    version: bytes


def state_method(prefix: str) -> str:
    """The name of the stream method on the wire."""
    return f"state.{prefix}"


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
        courtesy: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`provide(version)` gives a snapshot of that version (b"": of the newest), or None if it is not here.
        `donated` is called after each download with the downloader, the snapshot and the bytes given. `courtesy`
        returns when this peer does not need its line for itself: each chunk waits for that, COURTESY at most."""
        self._endpoint = endpoint
        self._method, self._root_method = state_method(prefix), root_method(prefix)
        self._last_root = -math.inf  # loop time at which a state was last copied only to be hashed
        self._donated, self._courtesy = donated, courtesy
        self._max_downloads = max_downloads
        self._served: list[_Ticket] = []
        self._line: list[_Ticket] = []  # in order of arrival
        self._done: dict[bytes, deque[Holder]] = {}  # version → peers that downloaded it here, newest last
        self._pins = Pins(provide)
        self.expecting = self._pins.expecting  # for a state that this peer downloads itself
        self._news = Bell()
        # Reads from other processes wait for each other anyway. With this lock they wait on the loop, and not each in a
        # thread of the executor, which would soon have none left.
        self._elsewhere = asyncio.Lock()
        self._closed = False

    def start(self) -> None:
        """Begins to answer. Raises ValueError if this endpoint has a donor of the prefix already."""
        self._endpoint.serve_stream(self._method, StateRequest, self._serve)
        self._endpoint.serve(self._root_method, RootQuestion, self._tell_root)

    def close(self) -> None:
        """Takes no more downloads and frees the snapshots; downloads under way go on. Idempotent."""
        if not self._closed:
            self._closed = True
            self._endpoint.withdraw(self._method, self._root_method)
            self._pins.close()

    async def _serve(self, peer: PeerID, request: StateRequest, stream: Stream) -> None:
        asked = loop_time()
        ticket = _Ticket(self._endpoint.prefix(peer), request.version)

        def gives_way(taken: int) -> bool:
            """Whether the download takes next to nothing, or its network has two places more than that of a peer in
            line. Its peer comes again, and goes on from there."""
            idle = taken < (LEAST_TAKEN if self._line else 1)
            idle = idle and not self._elsewhere.locked()  # it may be waiting for a long read from another process
            return idle or any(self._places(ticket) > self._places(each) + 1 for each in self._line)

        taking = unless_stuck(stream, PATIENCE, gives_way)
        async with self._turn(ticket, stream), AsyncExitStack() as stack:
            # A large state takes a minute to copy and hash; meanwhile the downloader hears that this peer lives.
            async with beside(stack.enter_async_context(self._pins.use(request.version, asked))) as preparing:
                while not (await asyncio.wait([preparing], timeout=SIGN_OF_LIFE))[0]:
                    await stream.send(InLine())
            pin = preparing.result()
            async with taking:
                given = await self._give(pin, stream)
        if given and request.version and (addresses := self._endpoint.own_word(peer)):
            self._done.setdefault(request.version, deque(maxlen=MAX_NAMED)).append(Holder(peer, addresses))
            self._news.ring()
        if given and self._donated is not None:
            self._donated(peer, pin.state.snapshot, given)

    @asynccontextmanager
    async def _turn(self, ticket: _Ticket, stream: Stream) -> AsyncIterator[None]:
        """Waits in line. Raises CallRefused if the line is too long, or when the download has to give way."""
        self._line.append(ticket)
        if len(self._line) > (MOST_IN_LINE if self._max_downloads else 0):
            fullest = Counter(each.network for each in self._line).most_common(1)[0][0]
            self._line.remove(next(each for each in reversed(self._line) if each.network == fullest))
        try:
            self._admit()
            await self._wait_in_line(ticket, stream)
            yield
        except TimeoutError:
            raise CallRefused("busy", "others wait, or nothing was taken for long") from None
        finally:
            self._line = [each for each in self._line if each is not ticket]
            self._served = [each for each in self._served if each is not ticket]
            if not self._served and not self._line:
                self._done.clear()  # nobody is left to be told
            self._admit()

    def _admit(self) -> None:
        """Gives free places to those in line, if there is memory for the state that they want."""
        while self._line and len(self._served) < self._max_downloads:
            copies = {each.version for each in self._served} - self._pins.lent
            here = copies | self._pins.lent
            fitting = [t for t in self._line if t.version in here or len(copies) < MOST_VERSIONS]
            if not fitting:
                break
            ticket = min(fitting, key=self._places)  # of equals the one that came first
            self._line.remove(ticket)
            self._served.append(ticket)
        self._news.ring()

    def _places(self, ticket: _Ticket) -> int:
        """How many downloads its network has under way."""
        return sum(each.network == ticket.network for each in self._served)

    async def _wait_in_line(self, ticket: _Ticket, stream: Stream) -> None:
        told: set[Holder] = set()
        while ticket in self._line:
            others = [holder for holder in self._done.get(ticket.version, ()) if holder not in told]
            told.update(others)
            async with unless_stuck(stream, PATIENCE):
                await stream.send(InLine(tuple(others)))
            with suppress(TimeoutError):
                async with asyncio.timeout(SIGN_OF_LIFE):
                    await self._news.wait()
        if ticket not in self._served:
            raise CallRefused("busy", f"{len(self._served) + len(self._line)} others are downloading from this peer")

    async def _give(self, pin: Pin, stream: Stream) -> int:
        """Sends the chunks that are asked for; returns how many bytes they have."""
        given, state = 0, pin.state
        await stream.send(ManifestHeader(LIBRARY), state.manifest)
        while True:
            try:
                request, _ = await stream.receive(ChunkRequest)
            except EndOfStream:
                return given
            if request.first + request.count > state.layout.chunks:
                raise CallRefused("chunk", f"this state has {state.layout.chunks} chunks")
            for chunk in range(request.first, request.first + request.count):
                given += await self._give_chunk(state, chunk, stream)

    async def _give_chunk(self, state: PinnedState, chunk: int, stream: Stream) -> int:
        if self._courtesy is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(COURTESY):
                    await self._courtesy()
        pieces = await self._read_elsewhere(state, chunk) if state.is_distant(chunk) else state.chunk(chunk)
        await stream.send(ChunkHeader(chunk), pieces)
        return sum(len(piece) for piece in pieces)

    async def _tell_root(self, peer: PeerID, question: RootQuestion) -> RootAnswer:
        """Copies and hashes the state once for all peers that ask while it is kept. Another version is refused within
        BETWEEN_ROOTS."""
        asked = loop_time()
        if not self._pins.has(question.version):
            if asked < self._last_root + BETWEEN_ROOTS:
                raise CallRefused("busy", "this peer has just told the root of another state")
            self._last_root = asked
        async with self._pins.use(question.version, asked) as pin:  # may be one copy more than MOST_VERSIONS
            return RootAnswer(pin.state.root)

    async def _read_elsewhere(self, state: PinnedState, chunk: int) -> list[memoryview]:
        """Reads a chunk from another process or a file. Raises CallRefused if it cannot be read any more."""
        async with self._elsewhere:
            try:
                return await offload(state.chunk, chunk)
            except (SiteError, OSError) as error:
                raise gone(error) from error
