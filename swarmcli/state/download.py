"""Downloads a state from several donors at once. Each chunk is checked; a donor that fails is replaced.

Donors with equal manifests give parts of one state (see `assembly`). A donor whose state differs (unlike processors
may differ in the last bit) is put aside: its state is begun only if all donors of the first state fail. All chunks of
the result have the hashes of one manifest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarmcli.concurrency import OFFLOAD_FROM, Bell, beside, on_executor, unless_silent
from swarmcli.errors import CallRefused, CompressionError, NetworkError, ProtocolViolation, StateDownloadError
from swarmcli.events import PeerRefused
from swarmcli.network import Endpoint, PeerID, Stream
from swarmcli.network.addresses import is_direct
from swarmcli.network.loop_thread import loop_time, offload
from swarmcli.state.assembly import Assembly, DownloadedState
from swarmcli.state.donor import (
    LIBRARY,
    MAX_CHUNKS_AT_ONCE,
    ChunkHeader,
    ChunkRequest,
    Holder,
    InLine,
    ManifestHeader,
    StateRequest,
    state_method,
)
from swarmcli.state.snapshot import MAX_MANIFEST, StateOutline, read_manifest
from swarmcli.words import format_size, printable, roughly

PARALLEL = 4  # donors that give something at a time
MOST_VISITS = 8  # at a time, those included in whose line this peer waits
MOST_HEARSAY = 64  # donors that are known, above which those that others name are ignored
MOST_BYTES = 1 << 40  # of a state, unless the caller says otherwise
# Seconds
BUSY_PAUSE = 0.5  # before donors that were busy are asked again
OPENING = 60.0  # without a word before the manifest: the donor may have to copy and hash its state
SILENCE = 20.0  # without a byte of a chunk that was asked for
PATIENCE = 10.0  # for a chunk that another donor could give; a donor in a round of its own gives one in 2 s
STALLED = 20.0  # without a chunk that counts, after which other donors are asked beside the visited one
BATCH_TIME = 0.5  # that a donor needs for one request: at the end nobody waits long for the slowest
SPEED_SECONDS = 10.0  # by which the speed of a download is measured, since lines change …
SPEED_CHUNKS = 4  # … but by no fewer chunks: a slow line may take longer for one

Check = Callable[[StateOutline], object]


class Unequal(Exception):
    """The donor's state is not the one that is being put together."""


@dataclass(slots=True)
class DownloadProgress:
    """How far a download is; any thread may look. `clock`: the loop's time, in seconds."""

    clock: Callable[[], float]
    total: int = 0  # bytes of the state; 0: no donor has answered yet
    received: int = 0  # bytes that have arrived, those included that had to be sent again
    what: str = "the state"
    began: float = field(init=False)
    moved: float = field(init=False)  # when the last chunk that counts came; before the first: when it began
    _recent: deque[tuple[float, int]] = field(init=False, default_factory=deque)  # (time, bytes that had arrived)

    def __post_init__(self) -> None:
        self.began = self.moved = self.clock()

    def begin(self, total: int) -> None:
        """A donor has answered: the state has `total` bytes."""
        self._recent = deque([(self.clock(), 0)])
        self.total, self.received = total, 0

    def note(self, received: int) -> None:
        """`received` bytes have arrived by now."""
        self.received, now = received, self.clock()
        self._recent.append((now, received))
        while len(self._recent) > SPEED_CHUNKS and self._recent[1][0] <= now - SPEED_SECONDS:
            self._recent.popleft()

    def sentence(self, limit: float | None) -> str:
        """For people: how many bytes are missing, and, if known, how long they take. `limit`: bytes per second that
        this peer's user allows it to receive."""
        total, received, now = self.total, min(self.received, self.total), self.clock()
        if not total:
            return f"downloading {self.what}: no donor has answered for {roughly(now - self.began)}"
        since, before = self._recent[0]
        speed = (self.received - before) / (now - since) if received and now > since else limit or 0.0
        done = f"{format_size(received)} of " if received else ""
        left = f" at {format_size(speed)}/s, about {roughly((total - received) / speed)}" if speed else ""
        return f"downloading {self.what}: {done}{format_size(total)}{left}" + (" left" if done else "")


async def download_state(
    endpoint: Endpoint,
    prefix: str,
    donors: Sequence[PeerID],
    *,
    relayed: Sequence[PeerID] = (),
    version: bytes = b"",
    timeout: float,
    max_bytes: int = MOST_BYTES,
    check: Check | None = None,
    spool: Path | None = None,
    progress: DownloadProgress | None = None,
) -> DownloadedState:
    """Downloads the state `version` (b"": that of the first donor that answers) from several donors at a time.

    `donors` come best first; those that are `relayed` are asked when no other one is left, since their bytes use
    relays' lines. `check` runs in a thread beside the loop, before memory is allocated for the state, and raises
    ValueError for an outline that does not fit here. With `spool`, a directory, the state is put together in a file
    there, which has no name and is gone with the last tensor: only the chunks on their way are in memory. Donors may
    let this peer wait in line. After `timeout` seconds without a chunk that counts it gives up; how long the whole
    takes depends on the lines. `progress` is kept up to date meanwhile.
    Raises StateDownloadError, whose `attempts` say what happened with each donor.
    """

    def read(manifest: bytes) -> StateOutline:
        outline = read_manifest(manifest, max_bytes)
        if version and outline.version != version:
            raise ValueError("a state of another version than the one that was asked for")
        if check is not None:
            check(outline)
        return outline

    progress = progress or DownloadProgress(asyncio.get_running_loop().time)
    bound = asyncio.timeout(timeout)

    def came() -> None:
        progress.moved = progress.clock()
        if not bound.expired():
            bound.reschedule(asyncio.get_running_loop().time() + timeout)

    download = _Download(endpoint, prefix, version, read, spool, progress, came)
    try:
        async with bound:
            return await download.run(donors, relayed)
    except TimeoutError:
        raise download.failure(f"nothing of the state came for {timeout:g} s") from None


# Ranks of donors: those of a higher rank are asked only when no donor of a lower one gives anything.
_FRESH = 0  # is asked as soon as there is room for one more
_LATER = 1  # was busy, or lost after it gave something; or is reached over a relay, which has others to serve
_APART = 2  # has another state, which is begun only when nobody gives the one that is being put together
_STALLED = 3  # gave next to nothing


@dataclass(eq=False)
class _Donor:
    """A donor as a download knows it: `in_line` while the donor lets it wait, `fetching` from the manifest on."""

    peer: PeerID
    rank: int
    due: float = 0.0  # loop time before which it is not asked
    patience: float = STALLED  # seconds without a chunk from it; doubled each time: it may be slow and honest
    lost: bool = False  # after it gave something; it is asked once more
    gave: int = 0  # chunks that count, from this visit
    moved: float = 0.0  # loop time of the last of them
    in_line: bool = False
    fetching: bool = False
    taken: set[int] = field(default_factory=set)  # chunks that it was asked for and that are not checked yet
    task: asyncio.Task[None] | None = None


class _Download:
    """Decides which donor is asked next, and which state is put together."""

    def __init__(
        self,
        endpoint: Endpoint,
        prefix: str,
        version: bytes,
        read: Callable[[bytes], StateOutline],
        spool: Path | None,
        progress: DownloadProgress,
        came: Callable[[], None],
    ) -> None:
        """`read`, which runs beside the loop, raises ValueError for a manifest of a state that is not wanted. `came` is
        called for each chunk that counts."""
        self._endpoint, self._prefix, self._version = endpoint, prefix, version
        self._read, self._spool, self._progress, self._came = read, spool, progress, came
        self._pace = 0.0  # seconds for a chunk from the quickest donor
        self._news = Bell()  # rings when another donor may be visited, a chunk be asked for, or nothing is missing
        self._attempts: dict[str, str] = {}
        self._known = {endpoint.peer_id}  # peers that are not added again when others name them
        self._waiting: list[_Donor] = []
        self._visited: list[_Donor] = []
        self._assembly: Assembly | None = None
        self._settled = False  # on the assembly: donors of other states are put aside
        self._joining = asyncio.Lock()

    def failure(self, message: str) -> StateDownloadError:
        words = "; ".join(f"{peer[:10]}: {reason}" for peer, reason in self._attempts.items())
        return StateDownloadError(f"{message} ({words or 'there was nobody to ask'})", self._attempts)

    async def run(self, donors: Sequence[PeerID], relayed: Sequence[PeerID]) -> DownloadedState:
        self._known.update(donors, relayed)
        self._waiting += [_Donor(peer, _FRESH) for peer in donors] + [_Donor(peer, _LATER) for peer in relayed]
        while self._waiting:
            self._settled = False
            async with asyncio.TaskGroup() as tasks:
                await self._visit_donors(tasks)
            if self._complete:
                assert self._assembly is not None
                try:
                    return await offload(self._assembly.finish)
                except CompressionError as error:  # the hashes are right, but no codec makes such bytes
                    for peer in self._assembly.donors:
                        self._refuse(peer, str(error))
                    self._assembly = None
                except OSError as error:
                    raise self.failure(f"the state that came cannot be kept here: {error}") from error
        raise self.failure("no donor gave a complete state")

    @property
    def _complete(self) -> bool:
        return self._assembly is not None and self._assembly.complete

    async def _visit_donors(self, tasks: asyncio.TaskGroup) -> None:
        """Keeps visiting donors until the state is complete, or nobody is left who gives it."""
        while not self._complete:
            now, live = loop_time(), self._live()
            fresh = [donor for donor in self._waiting if donor.rank == _FRESH]
            ready = [donor for donor in fresh if donor.due <= now]
            if ready and len(live) < MOST_VISITS and sum(not donor.in_line for donor in live) < PARALLEL:
                donor = ready[0]
                self._waiting.remove(donor)
                self._visited.append(donor)
                donor.in_line, donor.fetching, donor.gave, donor.moved = False, False, 0, now
                donor.task = tasks.create_task(self._visit(donor))
            elif self._waiting and not live and not fresh:
                rank = min(donor.rank for donor in self._waiting)
                for donor in self._waiting:
                    donor.rank = _FRESH if donor.rank == rank else donor.rank
                if rank >= _APART:
                    break
            elif not self._waiting and not self._visited:
                return
            else:
                turns = [donor.due for donor in fresh if donor.due > now]
                turns += [donor.moved + self._patience(donor) for donor in live if not donor.in_line]
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(min(turns, default=None)):
                        await self._news.wait()
        for donor in self._visited:
            if donor.task is not None and not self._is_ending(donor):
                donor.task.cancel()

    def _live(self) -> list[_Donor]:
        """The visited donors that may be expected to give something."""
        now = loop_time()
        return [donor for donor in self._visited if donor.in_line or donor.moved + self._patience(donor) > now]

    def _patience(self, donor: _Donor) -> float:
        return max(donor.patience, 2 * self._pace)

    def _is_ending(self, donor: _Donor) -> bool:
        """Whether the visit ends by itself: the donor gave all that it was asked for, and nothing is missing."""
        return self._complete and donor.fetching and not donor.taken

    async def _visit(self, donor: _Donor) -> None:
        try:
            await self._fetch_from(donor)
        except asyncio.CancelledError:
            self._attempts.setdefault(donor.peer.text, "it had not given what was asked for")
            donor.rank, donor.patience = _STALLED, 2 * donor.patience
            self._waiting.append(donor)
            raise
        except Unequal:
            self._attempts[donor.peer.text] = "its state is not equal to the others'"
            donor.rank = _APART
            self._waiting.append(donor)
        except (NetworkError, TimeoutError) as error:
            self._attempts[donor.peer.text] = str(error) or "it fell silent"
            busy = isinstance(error, CallRefused) and error.code == "busy"
            if busy or (donor.gave and not donor.lost):
                donor.rank, donor.lost = _LATER, donor.lost or not busy
                donor.due = loop_time() + BUSY_PAUSE * (1 + self._endpoint.random.random())
                self._waiting.append(donor)
        except OSError as error:
            self._attempts[donor.peer.text] = f"what it gives cannot be kept here: {error}"
        except ValueError as error:
            self._refuse(donor.peer, str(error))
        finally:
            self._visited.remove(donor)
            self._news.ring()

    def _refuse(self, peer: PeerID, reason: str) -> None:
        self._attempts[peer.text] = reason
        self._endpoint.events.emit(PeerRefused(peer.text, reason, "state"))

    # One visit

    async def _fetch_from(self, donor: _Donor) -> None:
        """Waits in the donor's line, and fetches what is missing until nothing is.

        Raises Unequal, ValueError for messages that no honest donor sends, NetworkError and TimeoutError, and OSError
        if the state cannot be kept here. The chunks that the donor gave until then are kept.
        """
        request, method = StateRequest(self._version), state_method(self._prefix)
        assembly = None
        try:
            async with self._endpoint.stream(donor.peer, method, request, timeout=OPENING) as stream:
                header, manifest = await self._wait_in_line(donor, stream)
                try:
                    assembly = await self._join(bytes(manifest))
                except ValueError as error:
                    if header.library == LIBRARY:
                        raise
                    there = printable(header.library, 40) or "an unknown library"
                    raise ValueError(f"{error} (it has {there}, this peer {LIBRARY})") from error
                donor.in_line, donor.fetching, donor.moved = False, True, loop_time()
                self._news.ring()
                arrived: asyncio.Queue[tuple[int, memoryview]] = asyncio.Queue(2)
                async with beside(self._check(donor, assembly, arrived)):
                    await self._fetch(donor, assembly, stream, arrived)
        finally:
            if assembly is not None:  # only after the stream is closed: until then its chunks might still be written
                assembly.put_back(donor.taken)
            donor.taken.clear()

    async def _wait_in_line(self, donor: _Donor, stream: Stream) -> tuple[ManifestHeader, memoryview]:
        answers: Any = ManifestHeader | InLine
        while True:
            async with unless_silent(stream, OPENING):
                header, manifest = await stream.receive(answers, _memory_for_manifest)
            if isinstance(header, ManifestHeader):
                return header, manifest
            donor.in_line = True
            self._hear(donor.peer, header.others)
            self._news.ring()

    def _hear(self, donor: PeerID, others: Sequence[Holder]) -> None:
        """The donor in whose line this peer waits names others that have the state."""
        for other in others:
            if other.peer_id not in self._known and len(self._known) < MOST_HEARSAY:
                self._known.add(other.peer_id)
                self._endpoint.learn(other.peer_id, other.addresses, horizon=self._endpoint.horizon(donor))
                rank = _FRESH if any(map(is_direct, other.addresses)) else _LATER
                place = self._endpoint.random.randrange(len(self._waiting) + 1)
                self._waiting.insert(place, _Donor(other.peer_id, rank))

    async def _join(self, manifest: bytes) -> Assembly:
        """The assembly that this manifest belongs to. Raises ValueError, OSError if there is no room, or Unequal if it
        is of another state."""
        async with self._joining:  # otherwise several donors of one state would each allocate memory for it
            if self._assembly is None or self._assembly.manifest != manifest:
                if self._settled:
                    raise Unequal
                # A manifest of 262,144 tensors takes a second.
                outline = await offload(self._read, manifest)
                self._assembly = None  # freed first: its memory may be the next one's
                self._assembly = await offload(Assembly, manifest, outline, self._spool)
                self._progress.begin(self._assembly.layout.nbytes)
            self._settled = True
            return self._assembly

    async def _fetch(
        self, donor: _Donor, assembly: Assembly, stream: Stream, arrived: asyncio.Queue[tuple[int, memoryview]]
    ) -> None:
        coming, batch, got, began = deque[int](), 1, 0, loop_time()
        while True:
            while len(coming) < batch:  # the next request is on its way before this one is answered
                chunks = assembly.take(batch)
                if not chunks:
                    break
                if not donor.taken:
                    donor.moved = loop_time()
                coming.extend(chunks)
                donor.taken.update(chunks)
                await stream.send(ChunkRequest(chunks.start, len(chunks)))
            if not coming:
                await arrived.join()
                if assembly.complete:
                    return
                self._relieve_the_late()
                with suppress(TimeoutError):  # what others were asked for may be put back, or they become late
                    async with asyncio.timeout(PATIENCE):
                        await self._news.wait()
                continue
            chunk = coming[0]
            content = assembly.slot(chunk)
            async with unless_silent(stream, SILENCE):
                await _receive_chunk(stream, content, chunk)
            coming.popleft()
            await arrived.put((chunk, content))
            got += 1
            pace = max(loop_time() - began, 1e-3) / got
            self._pace = min(pace, self._pace or pace)
            batch = max(1, min(MAX_CHUNKS_AT_ONCE, 2 * batch, int(BATCH_TIME / pace)))

    def _relieve_the_late(self) -> None:
        """Called when a donor has nothing left to give: ends the visits of donors that have owed chunks for long, so
        that this one can give these chunks."""
        since = loop_time() - max(PATIENCE, 2 * self._pace)
        for late in self._visited:
            if late.taken and late.moved <= since and late.task is not None and not late.task.cancelling():
                late.task.cancel()

    async def _check(self, donor: _Donor, assembly: Assembly, arrived: asyncio.Queue[tuple[int, memoryview]]) -> None:
        """Checks chunks in the order of their arrival, while the next ones arrive."""
        while True:
            chunk, content = await arrived.get()
            assembly.received += len(content)
            self._progress.note(assembly.received)
            nbytes = max(len(content), OFFLOAD_FROM) if assembly.in_file else len(content)  # disks take their time
            if not await on_executor(nbytes, assembly.is_true, chunk, content):
                raise ValueError(f"chunk {chunk} of its state does not have the hash that it names")
            assembly.note(chunk, donor.peer)
            donor.taken.remove(chunk)
            donor.gave += 1
            donor.moved = loop_time()
            self._came()
            arrived.task_done()
            if assembly.complete:
                self._news.ring()


async def _receive_chunk(stream: Stream, slot: memoryview, chunk: int) -> None:
    """Reads a chunk into its slot. Raises ProtocolViolation for any other chunk."""

    def into(header: ChunkHeader, size: int) -> memoryview:
        if header.chunk != chunk or size != len(slot):
            raise ProtocolViolation(f"expected chunk {chunk} of {len(slot)} bytes, got {header.chunk} of {size}")
        return slot

    header, payload = await stream.receive(ChunkHeader, into)
    if not payload:
        raise ProtocolViolation(f"chunk {header.chunk} is empty")


def _memory_for_manifest(header: ManifestHeader | InLine, size: int) -> memoryview:
    if size > MAX_MANIFEST:
        raise ProtocolViolation(f"a manifest of {size} bytes, at most {MAX_MANIFEST}")
    return memoryview(bytearray(size))
