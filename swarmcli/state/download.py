"""Downloads a state from several donors at once. Each chunk is checked; a donor that fails is replaced.

Donors with equal manifests give parts of one state (see `assembly`). A donor whose state differs (unlike processors
may differ in the last bit) is put aside: only if all equal ones fail, its state is taken instead, with the chunks of
the other that are equal. All or nothing: one donor names the hashes of all chunks of the result.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarmcli.errors import CallRefused, CompressionError, NetworkError, ProtocolViolation, StateDownloadError
from swarmcli.events import PeerRefused
from swarmcli.network import Endpoint, PeerID, Stream
from swarmcli.network.addresses import is_direct
from swarmcli.network.loop_thread import offload
from swarmcli.state.assembly import Assembly, DonorDigests, DownloadedState, DownloadOptions, Unequal
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
from swarmcli.state.snapshot import MAX_MANIFEST, StateOutline, digest_of_chunk, read_manifest
from swarmcli.tasks import Bell, beside, unless_silent
from swarmcli.words import format_size, printable, roughly

SPEED_SECONDS = 10.0  # the last ones tell the speed of a download: lines change …
SPEED_CHUNKS = 4  # … but no fewer chunks, of which a slow line takes longer for one

Check = Callable[[StateOutline], Sequence[bytes] | None]


@dataclass(slots=True)
class DownloadProgress:
    """How far a download is; any thread may look. `clock`: of the loop, in seconds."""

    clock: Callable[[], float]
    total: int = 0  # bytes of the state; 0: no donor has answered yet
    received: int = 0  # bytes that have arrived, those included that had to be sent again
    what: str = "the state"
    began: float = field(init=False)
    moved: float = field(init=False)  # when the last chunk that counts came; before the first: when it began
    _recent: deque[tuple[float, int]] = field(init=False, default_factory=deque)  # when so many bytes had arrived

    def __post_init__(self) -> None:
        self.began = self.moved = self.clock()

    def begin(self, total: int) -> None:
        """A donor has answered: the state has so many bytes."""
        self._recent = deque([(self.clock(), 0)])
        self.total, self.received = total, 0

    def note(self, received: int) -> None:
        """So many bytes have arrived by now."""
        self.received, now = received, self.clock()
        self._recent.append((now, received))
        while len(self._recent) > SPEED_CHUNKS and self._recent[1][0] <= now - SPEED_SECONDS:
            self._recent.popleft()

    def sentence(self, limit: float | None) -> str:
        """For people: how many bytes are missing, and how long they take, where that is known. `limit`: bytes per
        second that this peer's user allows it to receive."""
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
    max_bytes: int = 1 << 40,
    check: Check | None = None,
    spool: Path | None = None,
    progress: DownloadProgress | None = None,
    options: DownloadOptions = DownloadOptions(),  # noqa: B008  # frozen
) -> DownloadedState:
    """Downloads the state `version` (b"": the one that the first donor to answer has), from several at a time.

    `donors` come best first; those that are `relayed` are asked when no other one is left, since their bytes use the
    links of others. `check` raises ValueError for an outline that does not fit here, before memory is allocated for it,
    in a thread beside the loop; where the hashes of all chunks are known before, it returns them, and no donor's word
    counts. With `spool`, a directory, the state is put together in a file there, which has no name and is gone with the
    last tensor: only the chunks on their way are in memory. Donors may let this peer wait in line. After `timeout`
    seconds without a chunk that counts it gives up: how long the whole takes depends on the links. `progress` is kept
    up to date meanwhile.
    Raises StateDownloadError, whose `attempts` say what happened with each donor.
    """

    def make_room(manifest: bytes) -> Assembly:
        outline = read_manifest(manifest, max_bytes)
        if version and outline.version != version:
            raise ValueError("a state of another version than the one that was asked for")
        known = check(outline) if check is not None else None
        return Assembly(manifest, outline, spool, known, options)

    progress = progress or DownloadProgress(asyncio.get_running_loop().time)
    bound = asyncio.timeout(timeout)

    def came() -> None:
        progress.moved = progress.clock()
        if not bound.expired():
            bound.reschedule(asyncio.get_running_loop().time() + timeout)

    download = _Download(endpoint, prefix, version, make_room, progress, came, options)
    try:
        async with bound:
            return await download.run(donors, relayed)
    except TimeoutError:
        raise download.failure(f"nothing of the state came for {timeout:g} s") from None


class _Download:
    """Decides which donor is asked next, and which state is put together."""

    def __init__(
        self,
        endpoint: Endpoint,
        prefix: str,
        version: bytes,
        make_room: Callable[[bytes], Assembly],
        progress: DownloadProgress,
        came: Callable[[], None],
        options: DownloadOptions,
    ) -> None:
        """`make_room`, which runs beside the loop, raises ValueError for a manifest of a state that is not wanted, or
        has no room. `came` is called for each chunk that counts."""
        self.endpoint, self.prefix, self.version, self.came = endpoint, prefix, version, came
        self.progress, self.options = progress, options
        self._patience = options.stalled
        self.pace = 0.0  # seconds for a chunk from the quickest donor
        self.news = Bell()  # whenever another donor may be visited, or no more need to be
        self._make_room = make_room
        self._attempts: dict[str, str] = {}
        self._known: set[PeerID] = set()
        self._waiting: deque[PeerID] = deque()  # to be visited
        self._busy: list[PeerID] = []
        self._relayed: deque[PeerID] = deque()  # reached over relays: not asked yet
        self._unequal: list[PeerID] = []
        self._stalled: list[PeerID] = []  # gave next to nothing while others were put aside: they come behind those
        self._visits: set[_Visit] = set()
        self._second_chance: set[PeerID] = set()  # lost after they gave something: they are asked once more
        self._assembly: Assembly | None = None
        self._settled = False  # on the assembly: donors of other states are put aside
        self._joining = asyncio.Lock()

    def failure(self, message: str) -> StateDownloadError:
        words = "; ".join(f"{peer[:10]}: {reason}" for peer, reason in self._attempts.items())
        return StateDownloadError(f"{message} ({words or 'there was nobody to ask'})", self._attempts)

    async def run(self, donors: Sequence[PeerID], relayed: Sequence[PeerID]) -> DownloadedState:
        self._waiting.extend(donors or relayed)
        self._relayed.extend(relayed if donors else ())
        self._known.update(donors, relayed)
        while self._waiting:
            async with asyncio.TaskGroup() as tasks:
                await self._visit_all(tasks)
            if self._assembly is not None and self._assembly.complete:
                try:
                    return await offload(self._assembly.finish)
                except CompressionError as error:  # the hashes are those that were named, but no codec makes such
                    for donor in self._assembly.donors:
                        self._refuse(donor, str(error))
                    self._assembly, self._settled = None, False
                except OSError as error:
                    raise self.failure(f"the state that came cannot be kept here: {error}") from error
            if self._busy:
                await asyncio.sleep(self.options.busy_pause * (1 + self.endpoint.random.random()))
                self._waiting.extend(self._busy)
                self._busy.clear()
            elif self._relayed:
                self._waiting.extend(self._relayed)
                self._relayed.clear()
            else:  # all donors of this state have failed, or stall: next come those that have another state
                self._stalled.extend(self._waiting)
                if not self._unequal:
                    self._unequal, self._stalled = self._stalled, []
                    self._patience *= 2  # should they be slow and honest, their next turn is longer
                self._waiting, self._unequal = deque(self._unequal), []
                self._settled = False
        raise self.failure("no donor gave a complete state")

    async def _visit_all(self, tasks: asyncio.TaskGroup) -> None:
        """Keeps visiting donors until the state is complete, or nobody is left to ask."""
        while True:
            if self._assembly is not None and self._assembly.complete:
                for visit in self._visits:
                    if (not visit.fetching or visit.expected) and not visit.task.cancelling():
                        visit.task.cancel()  # it waits in line, or for what another one has given
                return
            active, most = self._active(), self.options.most_visits
            giving = sum(not each.in_line for each in active)
            if self._waiting and len(active) < most and giving < self.options.parallel:
                visit = _Visit(self, self._waiting.popleft())
                visit.task = tasks.create_task(self._visit(visit))
                self._visits.add(visit)
            elif not self._visits:
                return
            else:
                try:
                    async with asyncio.timeout(self._patience):
                        await self.news.wait()
                except TimeoutError:
                    if not self._waiting and not self._active():
                        self._waiting.extend([*self._busy, *self._relayed])
                        self._busy.clear()
                        self._relayed.clear()
                        if not self._waiting and (self._unequal or self._stalled):
                            for visit in self._visits:
                                visit.task.cancel()
                            return

    def _active(self) -> list[_Visit]:
        since = self.progress.clock() - max(self._patience, 2 * self.pace)
        return [visit for visit in self._visits if visit.in_line or visit.moved > since]

    async def _visit(self, visit: _Visit) -> None:
        donor = visit.peer
        try:
            await visit.run()
        except asyncio.CancelledError:  # others were quicker: this donor is asked after those that wait
            self._attempts.setdefault(donor.text, "it had not given what was asked for")
            self._waiting.append(donor)
            raise
        except Unequal:
            self._attempts[donor.text] = "its state is not equal to the others'"
            self._unequal.append(donor)
        except (NetworkError, TimeoutError) as error:
            self._attempts[donor.text] = str(error) or "it fell silent"
            if isinstance(error, CallRefused) and error.code == "busy":
                self._busy.append(donor)
            elif visit.gave and donor not in self._second_chance:
                self._second_chance.add(donor)
                self._busy.append(donor)
        except OSError as error:
            self._attempts[donor.text] = f"what it gives cannot be kept here: {error}"
        except ValueError as error:
            self._refuse(donor, str(error))
        finally:
            self._visits.remove(visit)
            self.news.ring()

    def _refuse(self, donor: PeerID, reason: str) -> None:
        self._attempts[donor.text] = reason
        self.endpoint.events.emit(PeerRefused(donor.text, reason, "state"))

    # For visits

    def hear(self, donor: PeerID, others: Sequence[Holder]) -> None:
        """The donor in whose line this peer waits names others that have the state."""
        for other in others:
            if other.peer_id not in self._known and len(self._known) < self.options.most_hearsay:
                self._known.add(other.peer_id)
                self.endpoint.learn(other.peer_id, other.addresses, horizon=self.endpoint.horizon(donor))
                queue = self._waiting if any(map(is_direct, other.addresses)) else self._relayed
                queue.insert(self.endpoint.random.randrange(len(queue) + 1), other.peer_id)

    async def join(self, manifest: bytes) -> Assembly:
        """The assembly that this manifest belongs to. Raises ValueError, or Unequal if it is of another state."""
        async with self._joining:  # or each of several donors of one state would have room made for it
            if self._assembly is None or self._assembly.manifest != manifest:
                if self._settled:
                    raise Unequal
                self._assembly = await offload(self._make_room, manifest)  # of 262,144 tensors it takes a second
                self.progress.begin(self._assembly.layout.nbytes)
            self._settled = True
            return self._assembly


class _Visit:
    """One visit to one donor: it waits in line, fetches what is missing, and checks every chunk.

    `in_line` while the donor lets this peer wait, `fetching` from the manifest on. Others may cancel its `task`.
    """

    task: asyncio.Task[None]

    def __init__(self, download: _Download, donor: PeerID) -> None:
        self.peer = donor
        self.in_line = self.fetching = False
        self.gave = 0  # chunks that count, from this donor
        self.expected = 0  # chunks that were asked for and have not been verified
        self.moved = download.progress.clock()  # when the last one that counts came
        self._download = download

    async def run(self) -> None:
        """Fetches whatever is missing, until nothing is.

        Raises Unequal, ValueError for messages that no honest donor sends, NetworkError and TimeoutError, OSError when
        a chunk cannot be kept here. The chunks that the donor gave until then are kept.
        """
        download, assembly, digests = self._download, None, None
        request, method = StateRequest(download.version), state_method(download.prefix)
        try:
            opening = download.options.opening
            async with download.endpoint.stream(self.peer, method, request, timeout=opening) as stream:
                header, manifest = await self._wait_in_line(stream)
                try:
                    assembly = await download.join(bytes(manifest))
                except ValueError as error:
                    if header.library == LIBRARY:
                        raise
                    there = printable(header.library, 40) or "an unknown library"
                    raise ValueError(f"{error} (it has {there}, this peer {LIBRARY})") from error
                digests = DonorDigests(
                    download.endpoint,
                    download.prefix,
                    self.peer,
                    header.pin,
                    assembly.layout.chunks,
                    timeout=download.options.digests,
                )
                self.in_line, self.fetching, self.moved = False, True, download.progress.clock()
                download.news.ring()
                await self._fetch(assembly, digests, stream)
        finally:
            # Not before the stream is closed: until then its chunks might still be written.
            if assembly is not None and digests is not None and not assembly.complete:
                assembly.forsake(digests)
                assembly.leave(self.task)

    async def _wait_in_line(self, stream: Stream) -> tuple[ManifestHeader, memoryview]:
        answers: Any = ManifestHeader | InLine
        while True:
            async with unless_silent(stream, self._download.options.opening):
                header, manifest = await stream.receive(answers, _memory_for_manifest)
            if isinstance(header, ManifestHeader):
                return header, manifest
            self.in_line = True
            self._download.hear(self.peer, header.others)
            self._download.news.ring()

    async def _fetch(self, assembly: Assembly, digests: DonorDigests, stream: Stream) -> None:
        clock, options = self._download.progress.clock, self._download.options
        arrived: asyncio.Queue[tuple[int, bytes, memoryview]] = asyncio.Queue(2)
        coming: deque[int] = deque()  # asked for and not received
        batch, got, began = 1, 0, clock()
        async with beside(self._verify(assembly, digests, arrived)):
            while True:
                while len(coming) < batch:  # the next request is on its way before this one is answered
                    chunks = assembly.take_nowait(self.task, batch)
                    if not chunks and not coming:
                        await arrived.join()  # a visit that waits for others has no chunk that they wait for
                        patience = max(options.patience, 2 * self._download.pace)
                        chunks = await assembly.take(self.task, batch, patience)
                    if not chunks:
                        break
                    if assembly.taken[chunks.start] is not self.task:
                        batch = 1  # a chunk of another visit is fetched, and taken over, alone
                    coming.extend(chunks)
                    self.expected += len(chunks)
                    await stream.send(ChunkRequest(chunks.start, len(chunks)))
                if not coming:
                    break
                slot = assembly.slot(coming[0], self.task)
                async with unless_silent(stream, options.silence):
                    digest = await _receive_chunk(stream, slot, coming[0])
                await arrived.put((coming[0], digest, slot))
                if assembly.taken.get(coming.popleft()) is not self.task:
                    await arrived.join()
                got += 1
                pace = max(clock() - began, 1e-3) / got
                self._download.pace = min(pace, self._download.pace or pace)
                batch = max(1, min(MAX_CHUNKS_AT_ONCE, 2 * batch, int(options.batch_time / pace)))

    async def _verify(
        self, assembly: Assembly, digests: DonorDigests, arrived: asyncio.Queue[tuple[int, bytes, memoryview]]
    ) -> None:
        """Checks chunks in the order in which they arrive, while the next ones do."""
        while True:
            chunk, named, content = await arrived.get()
            assembly.received += len(content)
            self._download.progress.note(assembly.received)
            if assembly.taken.get(chunk) is not self.task:
                await assembly.check(digests, chunk, await offload(digest_of_chunk, content))
                await assembly.take_over(chunk, self.task, content)
            if assembly.taken.get(chunk) is self.task:
                digest = await offload(assembly.settle, chunk, content)
                if digest != named:
                    raise ValueError(f"chunk {chunk} of its state does not have the hash that it names")
                digests.note(chunk, digest)
                await assembly.accept(digests, chunk, digest)
                self.gave += 1
                self.moved = self._download.progress.clock()
                self._download.came()
            self.expected -= 1
            arrived.task_done()
            if assembly.complete:
                self._download.news.ring()


async def _receive_chunk(stream: Stream, slot: memoryview, chunk: int) -> bytes:
    """Reads a chunk to where it belongs; returns the digest that goes with it."""

    def into(header: ChunkHeader, size: int) -> memoryview:
        if header.chunk != chunk or size != len(slot):
            raise ProtocolViolation(f"expected chunk {chunk} of {len(slot)} bytes, got {header.chunk} of {size}")
        return slot

    header, payload = await stream.receive(ChunkHeader, into)
    if not payload:
        raise ProtocolViolation(f"chunk {header.chunk} is empty")
    return header.digest


def _memory_for_manifest(header: ManifestHeader | InLine, size: int) -> memoryview:
    if size > MAX_MANIFEST:
        raise ProtocolViolation(f"a manifest of {size} bytes, at most {MAX_MANIFEST}")
    return memoryview(bytearray(size))
