"""One visit of a downloader to one donor: it waits in line, fetches what is missing, and checks every chunk."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from swarmcli.errors import CallRefused, ProtocolViolation
from swarmcli.network import Endpoint, PeerID, Stream
from swarmcli.network.loop_thread import offload
from swarmcli.state.collection import Collection, DonorDigests
from swarmcli.state.donor import (
    MAX_CHUNKS_AT_ONCE,
    ChunkHeader,
    ChunkRequest,
    Holder,
    InLine,
    ManifestHeader,
    StateRequest,
    state_method,
)
from swarmcli.state.snapshot import MAX_MANIFEST
from swarmcli.tasks import beside, unless_silent

_OPENING = 60.0  # seconds without a word before the manifest: the donor may have to copy its state
_SILENCE = 20.0  # seconds without a byte of a chunk that was asked for
_BATCH_TIME = 0.5  # seconds of a donor's speed in one request: at the end nobody waits long for the slowest

Join = Callable[[bytes], Collection]  # the collection that a manifest belongs to
Hear = Callable[[Sequence[Holder]], None]  # who else has the state


class Busy(Exception):
    """The donor serves as many as it can; it may be asked again."""


class Visit:
    """A visit. `in_line` while the donor lets this peer wait, `fetching` from the manifest on."""

    def __init__(self, endpoint: Endpoint, prefix: str, donor: PeerID, version: bytes) -> None:
        self.peer = donor
        self.in_line = self.fetching = False
        self.gave = 0  # chunks that count
        self._endpoint, self._prefix, self._version = endpoint, prefix, version
        self._unfinished: deque[int] = deque()  # chunks that were asked for and have not been accepted, in order
        self._digests: DonorDigests

    async def run(self, join: Join, hear: Hear, changed: Callable[[], None]) -> None:
        """Fetches whatever is missing, until nothing is. `changed` is called whenever somebody may want to know.

        Raises what it failed with (Busy, Unequal, ValueError for what no honest donor sends, NetworkError and
        TimeoutError, OSError when what comes cannot be kept here); what the donor gave until then is kept.
        """
        collection: Collection | None = None
        request, method = StateRequest(self._version), state_method(self._prefix)
        try:
            async with self._endpoint.stream(self.peer, method, request, timeout=_OPENING) as stream:
                header, manifest = await self._wait_in_line(stream, hear, changed)
                collection = join(bytes(manifest))
                chunks = collection.assembly.layout.chunks
                self._digests = DonorDigests(self._endpoint, self._prefix, self.peer, header.pin, chunks)
                self.in_line, self.fetching = False, True
                changed()
                await self._fetch(collection, stream, changed)
        except CallRefused as error:
            raise (Busy(str(error)) if error.code == "busy" else error) from None
        finally:
            # Not before the stream is closed: until then its chunks might still be written.
            if collection is not None and not collection.assembly.complete:
                collection.forsake(self._digests)
                collection.assembly.put_back(self._unfinished)

    async def _wait_in_line(
        self, stream: Stream, hear: Hear, changed: Callable[[], None]
    ) -> tuple[ManifestHeader, memoryview]:
        answers: Any = ManifestHeader | InLine
        while True:
            async with unless_silent(stream, _OPENING):
                header, manifest = await stream.receive(answers, _memory_for_manifest)
            if isinstance(header, ManifestHeader):
                return header, manifest
            self.in_line = True
            hear(header.others)
            changed()

    async def _fetch(self, collection: Collection, stream: Stream, changed: Callable[[], None]) -> None:
        assembly, clock = collection.assembly, asyncio.get_running_loop().time
        arrived: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue(2)
        coming: deque[int] = deque()  # asked for and not received
        batch, got, began = 1, 0, clock()
        async with beside(self._verify(collection, arrived, changed)):
            while True:
                while len(coming) < batch:  # the next request is on its way before this one is answered
                    chunks = assembly.take_nowait(batch) if coming else await assembly.take(batch)
                    if not chunks:
                        break
                    coming.extend(chunks)
                    self._unfinished.extend(chunks)
                    await stream.send(ChunkRequest(chunks.start, len(chunks)))
                if not coming:
                    break
                digest = await _receive_chunk(stream, assembly.slot(coming[0]), coming[0])
                await arrived.put((coming.popleft(), digest))
                got += 1
                speed = got / max(clock() - began, 1e-3)  # chunks per second
                batch = max(1, min(MAX_CHUNKS_AT_ONCE, 2 * batch, int(speed * _BATCH_TIME)))
            await arrived.join()

    async def _verify(
        self, collection: Collection, arrived: asyncio.Queue[tuple[int, bytes]], changed: Callable[[], None]
    ) -> None:
        """Checks chunks in the order in which they arrive, while the next ones do."""
        assembly = collection.assembly
        while True:
            chunk, named = await arrived.get()
            begin, end = assembly.layout.bounds(chunk)
            collection.received += end - begin
            digest = await offload(assembly.settle, chunk)
            if digest != named:
                raise ValueError(f"chunk {chunk} of its state does not have the hash that it names")
            self._digests.said(chunk, digest)
            await collection.accept(self._digests, chunk, digest)
            self._unfinished.popleft()
            self.gave += 1
            arrived.task_done()
            if assembly.complete:
                changed()


async def _receive_chunk(stream: Stream, slot: memoryview, chunk: int) -> bytes:
    """Reads a chunk to where it belongs; returns the digest that goes with it."""

    def into(header: ChunkHeader, size: int) -> memoryview:
        if header.chunk != chunk or size != len(slot):
            raise ProtocolViolation(f"expected chunk {chunk} of {len(slot)} bytes, got {header.chunk} of {size}")
        return slot

    async with unless_silent(stream, _SILENCE):
        header, payload = await stream.receive(ChunkHeader, into)
    if not payload:
        raise ProtocolViolation(f"chunk {header.chunk} is empty")
    return header.digest


def _memory_for_manifest(header: ManifestHeader | InLine, size: int) -> memoryview:
    if size > MAX_MANIFEST:
        raise ProtocolViolation(f"a manifest of {size} bytes, at most {MAX_MANIFEST}")
    return memoryview(bytearray(size))
