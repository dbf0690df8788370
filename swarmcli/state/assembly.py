"""A state in the making: where its chunks lie, which of them nobody has fetched, and whose hashes count.

Donors hash their chunks as they are asked for, so nobody knows all hashes of a state when its download begins. One
donor is the *reference*: a chunk that another one gave counts if its hash is the reference's for that chunk. When the
reference is lost or found to lie, another donor takes its place, and only those chunks stay that are equal in its state
too. So the result is one donor's state to the last bit, whoever sent the pieces.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from swarmcli.compression import NoCompression, TensorDescriptor, TensorMessage, extract
from swarmcli.compression.base import tensor_memory
from swarmcli.errors import NetworkError
from swarmcli.memory import fresh_memory, unwritten
from swarmcli.network import Endpoint, PeerID
from swarmcli.network.loop_thread import loop_time, to_its_end
from swarmcli.state.distant import AnyTensor, DistantTensor, loaded, pieces
from swarmcli.state.donor import MAX_DIGESTS_AT_ONCE, DigestAnswer, DigestQuestion, digest_method
from swarmcli.state.snapshot import DIGEST_BYTES, StateOutline, TensorEntry, digest_of_chunk
from swarmcli.state.unnamed_file import UnnamedFile
from swarmcli.state.witnesses import state_root
from swarmcli.tasks import Bell

Visit: TypeAlias = asyncio.Task[None]  # fetches chunks from one donor


@dataclass(frozen=True, slots=True)
class DownloadOptions:
    """How a download deals with its donors. Times in seconds."""

    parallel: int = 4  # donors that give something at a time
    most_visits: int = 8  # those included in whose line this peer waits
    most_hearsay: int = 64  # donors that others named
    busy_pause: float = 0.5  # before donors that were busy are asked again
    opening: float = 60.0  # without a word before the manifest: the donor may have to copy its state
    silence: float = 20.0  # without a byte of a chunk that was asked for
    patience: float = 10.0  # for what others have taken; a donor whose own round runs gives a chunk in 2 s
    stalled: float = 20.0  # without a chunk that counts, after which a visit keeps no other donor from being asked
    batch_time: float = 0.5  # of a donor's speed in one request: at the end nobody waits long for the slowest
    digests: float = 20.0  # for hashes, in one answer and in all of the first reference's: a donor hashes 1 GB a second


class Unequal(Exception):
    """The donor's state is another one than the one that is being put together."""


@dataclass(frozen=True)
class DownloadedState:
    """A whole state.

    contents  its tensors by name. They share one memory: copy those that are to outlive the others. Those of a state
              that went through a file lie there
    donors    the peers that gave something of it
    received  bytes of all chunks that came, those included that had to be fetched again
    exact     every bit as the donor has it; False where tensors travelled with a lossy codec
    manifest  and digests of all chunks, with which it can be handed on
    """

    version: bytes
    metadata: Any
    contents: Mapping[str, AnyTensor]
    donors: tuple[PeerID, ...]
    received: int
    exact: bool
    manifest: bytes = field(repr=False)
    digests: tuple[bytes, ...] = field(repr=False)

    @property
    def root(self) -> bytes:
        """32 bytes: equal for equal states."""
        return state_root(self.manifest, self.digests)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All of it in memory."""
        here = self.contents.items()
        return {name: tensor if isinstance(tensor, torch.Tensor) else loaded(tensor) for name, tensor in here}


class DonorDigests:
    """The digests of one donor's snapshot, asked for when they are needed."""

    def __init__(
        self, endpoint: Endpoint, prefix: str, peer: PeerID, pin: bytes, chunks: int, *, timeout: float
    ) -> None:
        """`timeout`: seconds for one answer."""
        self.peer = peer
        self._endpoint, self._method, self._pin, self._chunks = endpoint, digest_method(prefix), pin, chunks
        self._timeout = timeout
        self._known: dict[int, bytes] = {}
        self._asking = asyncio.Lock()
        self._spent = 0.0  # seconds

    def note(self, chunk: int, digest: bytes) -> None:
        """The donor named this digest with a chunk. Raises ValueError if it has named another one before."""
        if self._known.setdefault(chunk, digest) != digest:
            raise ValueError(f"it names two hashes for chunk {chunk} of one state")

    async def digest(self, chunk: int, patience: float) -> bytes:
        """Raises NetworkError, also when all answers took longer than `patience` (seconds), and ValueError for an
        answer that no honest donor gives."""
        async with self._asking:
            if chunk not in self._known:
                first = chunk - chunk % MAX_DIGESTS_AT_ONCE
                count = min(MAX_DIGESTS_AT_ONCE, self._chunks - first)
                question = DigestQuestion(self._pin, first, count)
                asked, timeout = loop_time(), max(min(self._timeout, patience - self._spent), 0.1)
                answer = await self._endpoint.call(self.peer, self._method, question, DigestAnswer, timeout=timeout)
                self._spent += loop_time() - asked
                if len(answer.digests) != count * DIGEST_BYTES:
                    raise ValueError(f"it names {len(answer.digests) // DIGEST_BYTES} hashes for {count} chunks")
                for place in range(count):
                    self.note(first + place, answer.digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES])
        return self._known[chunk]


class Assembly:
    """Visits take chunks, read them into their slots, settle them, and have them accepted or leave them to others.

    Where no chunk is open, an idle visit fetches one that another visit has taken, into memory of its own: the chunk's
    place is the other's until that visit has ended. If the idle one has the chunk first, it ends the other.

    The place is memory or, with `spool`, an unnamed file in that directory; then only the chunks that are on their way
    are in memory.
    """

    def __init__(
        self,
        manifest: bytes,
        outline: StateOutline,
        spool: Path | None = None,
        known: Sequence[bytes] | None = None,
        options: DownloadOptions = DownloadOptions(),
    ) -> None:
        """Takes the place for the whole state. Raises ValueError if there is none. `known`: the hashes of all chunks,
        where they need no donor's word."""
        self.manifest, self.outline, self._known = manifest, outline, known
        layout = self.layout = outline.layout
        self.received = 0  # bytes of chunks
        self._file: UnnamedFile | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        try:
            if spool is None:
                self._memory = fresh_memory(layout.nbytes)
            else:
                self._file = UnnamedFile(spool)
                self._file.resize(layout.nbytes)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"no room for a state of {layout.nbytes} bytes: {error}") from error
        self._bytes, self._spool = tensor_memory(self._memory), spool
        self._open = deque(range(layout.chunks))  # nobody fetches these
        self.taken: dict[int, Visit] = {}  # chunk → the visit that fetches it, and may write to its place
        self._arrived: dict[int, tuple[bytes, PeerID]] = {}  # chunk → its digest, and the donor that gave it
        self._changed = Bell()
        self._reference: DonorDigests | None = None
        self._patience = options.digests
        self._choosing = asyncio.Lock()

    @property
    def complete(self) -> bool:
        return len(self._arrived) == self.layout.chunks

    @property
    def donors(self) -> tuple[PeerID, ...]:
        """The peers that gave what has arrived."""
        return tuple(dict.fromkeys(peer for _, peer in self._arrived.values()))

    # Chunks, and where they lie

    def take_nowait(self, visit: Visit, most: int) -> range:
        """Up to `most` chunks to fetch, one behind the other; empty if others fetch all that are missing."""
        if not self._open:
            return range(0)
        first = last = self._open.popleft()
        while self._open and self._open[0] == last + 1 and last - first + 1 < most:
            last = self._open.popleft()
        self.taken.update(dict.fromkeys(range(first, last + 1), visit))
        return range(first, last + 1)

    async def take(self, visit: Visit, most: int, patience: float) -> range:
        """The same, but waits while others may still put chunks back. After `patience` seconds it returns the chunk
        that was taken first, which stays the other visit's. Empty only when the state is complete."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while not self._open and not self.complete:
                    await self._changed.wait()
        return self.take_nowait(visit, most) or next((range(chunk, chunk + 1) for chunk in self.taken), range(0))

    def slot(self, chunk: int, visit: Visit | None = None) -> memoryview:
        """Where a visit writes the content of a chunk: its place in memory, if this visit has taken it."""
        begin, end = self.layout.bounds(chunk)
        in_place = self._file is None and self.taken.get(chunk) is visit
        return self._bytes[begin:end] if in_place else unwritten(end - begin)

    async def take_over(self, chunk: int, visit: Visit, content: memoryview) -> None:
        """This visit has a chunk that another visit waits for: it ends the other and takes the chunk, unless that has
        arrived meanwhile."""
        if slow := self.taken.get(chunk):
            self.taken[chunk] = visit
            if not slow.cancelling():
                slow.cancel()
            await to_its_end(asyncio.wait([slow]))  # until then it may write there
        if self._file is None and self.taken.get(chunk) is visit:
            begin, end = self.layout.bounds(chunk)
            self._bytes[begin:end] = content

    def settle(self, chunk: int, content: memoryview) -> bytes:
        """Keeps the content of a slot, and returns its hash. For an executor; for several threads at once.

        Raises OSError if there is no room.
        """
        if self._file is not None:
            self._file.write(self.layout.bounds(chunk)[0], content)
        return digest_of_chunk(content)

    def leave(self, visit: Visit) -> None:
        """This visit writes into no slot any more: others may fetch the chunks that it has taken and not given."""
        self._put_back(chunk for chunk, other in self.taken.items() if other is visit)

    def _put_back(self, chunks: Iterable[int]) -> None:
        back = list(chunks)
        for chunk in back:
            self._arrived.pop(chunk, None)
            self.taken.pop(chunk, None)
        self._open = deque(sorted([*self._open, *back]))
        self._changed.ring()

    # Whose hashes count

    async def check(self, source: DonorDigests, chunk: int, digest: bytes) -> None:
        """Raises Unequal if a chunk of this source, with this digest, is not the reference's, and ValueError if it is
        not the one that was known."""
        if self._known is None:
            await self._compare(source, chunk, digest)
        elif self._known[chunk] != digest:
            raise ValueError(f"chunk {chunk} is not the one that was asked for: its hash was known before")

    async def accept(self, source: DonorDigests, chunk: int, digest: bytes) -> None:
        """A chunk of this source has been settled, with this digest. Raises what `check` does."""
        await self.check(source, chunk, digest)
        self._arrived[chunk] = digest, source.peer
        self.taken.pop(chunk, None)
        if self.complete:
            self._changed.ring()

    async def _compare(self, source: DonorDigests, chunk: int, digest: bytes) -> None:
        while True:
            reference = await self._choose(source)
            try:
                named = await reference.digest(chunk, self._patience)
            except (NetworkError, ValueError):
                self.forsake(reference)
                self._patience *= 2  # should all be slow, one of them has the time
                if reference is source:
                    raise
                continue
            if reference is not self._reference:
                continue  # the reference was forsaken while it was asked: another donor's hashes count now
            if named != digest:
                raise Unequal
            return

    def forsake(self, source: DonorDigests) -> None:
        """The source cannot be asked or believed any more. Without effect unless it is the reference."""
        if source is self._reference:
            self._reference = None

    async def _choose(self, source: DonorDigests) -> DonorDigests:
        """The reference. If there is none, this source becomes it, and chunks that differ in its state are put back."""
        async with self._choosing:
            if self._reference is None:
                arrived = list(self._arrived.items())
                own = {chunk: await source.digest(chunk, self._patience) for chunk, _ in arrived}
                self._put_back([chunk for chunk, (digest, _) in arrived if own[chunk] != digest])
                self._reference = source
            return self._reference

    # The end

    def finish(self) -> DownloadedState:
        """The complete state. For an executor. Raises CompressionError for what no codec makes, and OSError."""
        return DownloadedState(
            self.outline.version,
            self.outline.metadata,
            dict(self.layout.tensors(self._memory)) if self._file is None else self._tensors_of(self._file),
            self.donors,
            self.received,
            self.outline.exact,
            self.manifest,
            tuple(digest for _, (digest, _) in sorted(self._arrived.items())),
        )

    def _tensors_of(self, file: UnnamedFile) -> dict[str, AnyTensor]:
        """Tensors that a codec made are decoded one at a time, into another file."""
        assert self._spool is not None
        tensors: dict[str, AnyTensor] = {}
        decoded, end = UnnamedFile(self._spool), 0
        for entry, offset in zip(self.layout.entries, self.layout.offsets, strict=False):
            descriptor = entry.header.descriptor()
            if entry.codec == NoCompression.name:
                tensor = FileTensor(descriptor, file, offset)
                _check_booleans(tensor)
            else:
                content = extract(TensorMessage(entry.header, (file.read(offset, entry.nbytes),)))
                decoded.resize(end + descriptor.nbytes)
                decoded.write(end, tensor_memory(content))
                tensor = FileTensor(descriptor, decoded, end)
                end += descriptor.nbytes
            tensors[entry.name] = tensor
        return tensors


class FileTensor(DistantTensor):
    """Lies in a file, which is gone with the last of its tensors."""

    def __init__(self, descriptor: TensorDescriptor, file: UnnamedFile, offset: int) -> None:
        super().__init__(descriptor)
        self._file, self._offset = file, offset

    def read(self, begin: int, end: int) -> memoryview:
        return self._file.read(self._offset + begin, end - begin)


def _check_booleans(tensor: FileTensor) -> None:
    """Raises CompressionError for booleans with bytes other than 0 and 1; other types may have any bytes."""
    if tensor.dtype is torch.bool:
        header = TensorEntry.of("", tensor).header
        for begin, end in pieces(tensor.nbytes):
            extract(TensorMessage(type(header)(header.codec, header.dtype, (end - begin,)), (tensor.read(begin, end),)))
