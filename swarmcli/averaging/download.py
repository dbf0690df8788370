"""Downloads a state from several donors at once: what each gives is checked, and whoever fails is replaced.

Donors with equal manifests give parts of one state; the first manifest that arrives sets which. A donor with another
one (unlike processors may differ in the last bit) is put aside: only if all equal ones fail, its state is taken
instead, from the start. All or nothing: every chunk of what comes out had the hash that the manifest names.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from swarmcli.averaging.assembly import Assembly
from swarmcli.averaging.donor import (
    MAX_CHUNKS_AT_ONCE,
    ChunkHeader,
    ChunkRequest,
    ManifestHeader,
    StateRequest,
    state_method,
)
from swarmcli.averaging.snapshot import MAX_MANIFEST, StateOutline, read_manifest
from swarmcli.averaging.tasks import beside, unless_silent
from swarmcli.errors import CallRefused, NetworkError, ProtocolViolation, StateDownloadError
from swarmcli.events import PeerRefused
from swarmcli.network import Endpoint, PeerID, Stream
from swarmcli.network.thread import offload

_PARALLEL = 4  # donors at a time
_OPENING = 60.0  # seconds from the first knock to the manifest: the donor may have to copy and hash its state
_SILENCE = 20.0  # seconds without a byte of a chunk that was asked for
_BATCH_TIME = 0.5  # seconds of a donor's speed in one request: at the end nobody waits long for the slowest
_BUSY_PAUSE = 0.5  # seconds before donors that were busy are asked again

Check = Callable[[StateOutline], None]


@dataclass(frozen=True)
class DownloadedState:
    """A whole state. Its tensors share one memory: copy those that are to outlive the others.

    donors   who gave something of it
    bytes    of all chunks that came, those included that had to be fetched again
    """

    version: bytes
    metadata: Any
    tensors: dict[str, torch.Tensor]
    donors: tuple[PeerID, ...]
    bytes: int


async def download_state(
    endpoint: Endpoint,
    prefix: str,
    donors: Sequence[PeerID],
    *,
    version: bytes = b"",
    timeout: float,
    max_bytes: int = 1 << 40,
    check: Check | None = None,
) -> DownloadedState:
    """Downloads the state `version` (b"": the one that the first donor to answer has), from up to four at a time.

    `donors` come best first. `check` raises ValueError for an outline that does not fit here, before memory is
    allocated for it. Donors that are busy are asked again until `timeout`, which bounds the whole in seconds.
    Raises StateDownloadError, whose `attempts` say what happened with each donor.
    """
    download = _Download(endpoint, state_method(prefix), version, max_bytes, check)
    try:
        async with asyncio.timeout(timeout):
            return await download.run(donors)
    except TimeoutError:
        raise download.failure(f"no complete state within {timeout:g} s") from None


class _Busy(Exception):
    """The donor serves as many as it can; it may be asked again."""


class _Unequal(Exception):
    """The donor's state is another one than the one that is being put together."""


@dataclass
class _Collection:
    """What the donors of equal states have given."""

    manifest: bytes
    assembly: Assembly
    donors: dict[PeerID, None] = field(default_factory=dict)
    received: int = 0


class _Download:
    def __init__(self, endpoint: Endpoint, method: str, version: bytes, max_bytes: int, check: Check | None) -> None:
        self._endpoint, self._method, self._version = endpoint, method, version
        self._max_bytes, self._check = max_bytes, check
        self._attempts: dict[str, str] = {}
        self._collection: _Collection | None = None

    def failure(self, message: str) -> StateDownloadError:
        words = "; ".join(f"{peer[:10]}: {reason}" for peer, reason in self._attempts.items())
        return StateDownloadError(f"{message} ({words or 'there was nobody to ask'})", self._attempts)

    async def run(self, donors: Iterable[PeerID]) -> DownloadedState:
        waiting = deque(donors)
        unequal: list[PeerID] = []
        while waiting:
            busy: list[PeerID] = []
            async with asyncio.TaskGroup() as tasks:
                for _ in range(_PARALLEL):
                    tasks.create_task(self._visit_all(waiting, busy, unequal))
            collection = self._collection
            if collection is not None and collection.assembly.complete:
                return _finish(collection)
            if busy:
                await asyncio.sleep(_BUSY_PAUSE * (1 + self._endpoint.random.random()))
                waiting.extend(busy)
            else:
                self._collection = None
                waiting.extend(unequal)
                unequal.clear()
        raise self.failure("no donor gave a complete state")

    async def _visit_all(self, waiting: deque[PeerID], busy: list[PeerID], unequal: list[PeerID]) -> None:
        """Visits one donor after the other until the state is complete or nobody is left to ask."""
        while waiting and not (self._collection is not None and self._collection.assembly.complete):
            donor = waiting.popleft()
            try:
                await self._visit(donor)
            except _Busy:
                busy.append(donor)
            except _Unequal:
                unequal.append(donor)
            except (NetworkError, TimeoutError) as error:
                self._attempts[donor.text] = str(error) or "it fell silent"
            except ValueError as error:
                self._attempts[donor.text] = str(error)
                self._endpoint.events.emit(PeerRefused(donor.text, str(error), "state"))

    async def _visit(self, donor: PeerID) -> None:
        """Fetches from a donor whatever is missing. Raises what it failed with; what it gave is kept."""
        unfinished: deque[int] = deque()  # chunks that were asked for and are not there, in order
        collection: _Collection | None = None
        try:
            request = StateRequest(self._version)
            async with self._endpoint.stream(donor, self._method, request, timeout=_OPENING) as stream:
                async with unless_silent(stream, _OPENING):
                    _, manifest = await stream.receive(ManifestHeader, _memory_for_manifest)
                collection = self._join(donor, bytes(manifest))
                await self._fetch(donor, collection, stream, unfinished)
        except CallRefused as error:
            self._attempts[donor.text] = str(error)
            raise (_Busy() if error.code == "busy" else error) from None
        finally:
            # Not before the stream is closed: until then its chunks might still be written.
            if collection is not None:
                collection.assembly.put_back(unfinished)

    def _join(self, donor: PeerID, manifest: bytes) -> _Collection:
        """The collection that this manifest belongs to. Raises ValueError, or _Unequal if it is of another state."""
        if self._collection is None:
            content, layout, outline = read_manifest(manifest, self._max_bytes)
            if self._version and content.version != self._version:
                raise ValueError("a state of another version than the one that was asked for")
            if self._check is not None:
                self._check(outline)
            self._collection = _Collection(manifest, Assembly(content, layout, outline))
        elif self._collection.manifest != manifest:
            self._attempts[donor.text] = "its state is not equal to the others'"
            raise _Unequal
        return self._collection

    async def _fetch(self, donor: PeerID, collection: _Collection, stream: Stream, unfinished: deque[int]) -> None:
        assembly, clock = collection.assembly, asyncio.get_running_loop().time
        arrived: asyncio.Queue[int] = asyncio.Queue(2)
        coming: deque[int] = deque()  # asked for and not received
        batch, got, began = 1, 0, clock()
        async with beside(_verify(donor, collection, arrived, unfinished)):
            while True:
                while len(coming) < batch:  # the next request is on its way before this one is answered
                    chunks = assembly.take_nowait(batch) if coming else await assembly.take(batch)
                    if not chunks:
                        break
                    coming.extend(chunks)
                    unfinished.extend(chunks)
                    await stream.send(ChunkRequest(chunks.start, len(chunks)))
                if not coming:
                    break
                await _receive_chunk(stream, assembly, coming[0])
                await arrived.put(coming.popleft())
                got += 1
                speed = got / max(clock() - began, 1e-3)  # chunks per second
                batch = max(1, min(MAX_CHUNKS_AT_ONCE, 2 * batch, int(speed * _BATCH_TIME)))
            await arrived.join()


async def _receive_chunk(stream: Stream, assembly: Assembly, chunk: int) -> None:
    slot = assembly.slot(chunk)

    def into(header: ChunkHeader, size: int) -> memoryview:
        if header.chunk != chunk or size != len(slot):
            raise ProtocolViolation(f"expected chunk {chunk} of {len(slot)} bytes, got {header.chunk} of {size}")
        return slot

    async with unless_silent(stream, _SILENCE):
        header, payload = await stream.receive(ChunkHeader, into)
    if not payload:
        raise ProtocolViolation(f"chunk {header.chunk} is empty")


async def _verify(donor: PeerID, collection: _Collection, arrived: asyncio.Queue[int], unfinished: deque[int]) -> None:
    """Checks chunks in the order in which they arrive, while the next ones do. Raises ValueError for a false one."""
    while True:
        chunk = await arrived.get()
        collection.received += len(collection.assembly.slot(chunk))
        if not await offload(collection.assembly.is_intact, chunk):
            raise ValueError(f"chunk {chunk} of its state does not have the hash that its manifest names")
        unfinished.popleft()
        collection.donors[donor] = None
        collection.assembly.arrived()
        arrived.task_done()


def _memory_for_manifest(header: ManifestHeader, size: int) -> memoryview:
    if size > MAX_MANIFEST:
        raise ProtocolViolation(f"a manifest of {size} bytes, at most {MAX_MANIFEST}")
    return memoryview(bytearray(size))


def _finish(collection: _Collection) -> DownloadedState:
    outline = collection.assembly.outline
    tensors = collection.assembly.tensors()
    return DownloadedState(outline.version, outline.metadata, tensors, tuple(collection.donors), collection.received)
