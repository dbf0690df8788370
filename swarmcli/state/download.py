"""Downloads a state from several donors at once: what each gives is checked, and whoever fails is replaced.

Donors with equal manifests give parts of one state (see `collection`). A donor whose state differs (unlike processors
may differ in the last bit) is put aside: only if all equal ones fail, its state is taken instead, with what of the
other is equal. All or nothing: every chunk of what comes out has the hash that one donor names for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from swarmcli.errors import CompressionError, NetworkError, StateDownloadError
from swarmcli.events import PeerRefused
from swarmcli.network import Endpoint, PeerID, PeerInfo
from swarmcli.network.addresses import check_addresses
from swarmcli.network.loop_thread import offload
from swarmcli.state.assembly import Assembly
from swarmcli.state.collection import Collection, Unequal
from swarmcli.state.distant import AnyTensor, loaded
from swarmcli.state.donor import Holder
from swarmcli.state.snapshot import StateOutline, read_manifest
from swarmcli.state.visit import Busy, Visit
from swarmcli.tasks import Bell

_PARALLEL = 4  # donors that give something at a time
_MOST_VISITS = 8  # those included in whose line this peer waits
_MOST_HEARSAY = 64  # donors that others named
_BUSY_PAUSE = 0.5  # seconds before donors that were busy are asked again

Check = Callable[[StateOutline], None]
Raw: TypeAlias = bytes


@dataclass(frozen=True)
class DownloadedState:
    """A whole state.

    contents  its tensors by name. They share one memory: copy those that are to outlive the others. Those of a state
              that went through a file lie there
    exact     every bit as the donor has it; False where tensors travelled with a lossy codec
    donors    who gave something of it
    bytes     of all chunks that came, those included that had to be fetched again
    manifest  and digests of all chunks, with which it can be handed on
    """

    version: bytes
    metadata: Any
    contents: Mapping[str, AnyTensor]
    donors: tuple[PeerID, ...]
    bytes: int
    manifest: Raw = field(repr=False, default=b"")
    digests: tuple[Raw, ...] = field(repr=False, default=())
    exact: bool = True

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All of it in memory."""
        here = self.contents.items()
        return {name: tensor if isinstance(tensor, torch.Tensor) else loaded(tensor) for name, tensor in here}


async def download_state(
    endpoint: Endpoint,
    prefix: str,
    donors: Sequence[PeerID],
    *,
    version: bytes = b"",
    timeout: float,
    max_bytes: int = 1 << 40,
    check: Check | None = None,
    spool: Path | None = None,
) -> DownloadedState:
    """Downloads the state `version` (b"": the one that the first donor to answer has), from several at a time.

    `donors` come best first. `check` raises ValueError for an outline that does not fit here, before memory is
    allocated for it. With `spool`, a directory, the state is put together in a file there, which has no name and is
    gone with the last tensor: only the chunks on their way are in memory. Where donors let this peer wait in line, it
    waits until `timeout`, which bounds the whole in seconds. Raises StateDownloadError, whose `attempts` say what
    happened with each donor.
    """
    download = _Download(endpoint, prefix, version, max_bytes, check, spool)
    try:
        async with asyncio.timeout(timeout):
            return await download.run(donors)
    except TimeoutError:
        raise download.failure(f"no complete state within {timeout:g} s") from None


class _Download:
    def __init__(
        self,
        endpoint: Endpoint,
        prefix: str,
        version: bytes,
        max_bytes: int,
        check: Check | None,
        spool: Path | None,
    ) -> None:
        self._endpoint, self._prefix, self._version = endpoint, prefix, version
        self._max_bytes, self._check, self._spool = max_bytes, check, spool
        self._attempts: dict[str, str] = {}
        self._known: set[PeerID] = set()
        self._waiting: deque[PeerID] = deque()  # to be visited
        self._busy: list[PeerID] = []
        self._unequal: list[PeerID] = []
        self._visits: dict[Visit, asyncio.Task[None]] = {}
        self._second_chance: set[PeerID] = set()  # who was lost in the middle, and is asked once more
        self._collection: Collection | None = None
        self._settled = False  # on the collection: donors of others are put aside
        self._news = Bell()

    def failure(self, message: str) -> StateDownloadError:
        words = "; ".join(f"{peer[:10]}: {reason}" for peer, reason in self._attempts.items())
        return StateDownloadError(f"{message} ({words or 'there was nobody to ask'})", self._attempts)

    async def run(self, donors: Sequence[PeerID]) -> DownloadedState:
        self._waiting.extend(donors)
        self._known.update(donors)
        while self._waiting:
            async with asyncio.TaskGroup() as tasks:
                await self._visit_all(tasks)
            collection = self._collection
            if collection is not None and collection.assembly.complete:
                try:
                    return await offload(_finish, collection)
                except CompressionError as error:
                    self._reject(collection, str(error))
                except OSError as error:
                    raise self.failure(f"the state that came cannot be kept here: {error}") from error
            await self._think_again()
        raise self.failure("no donor gave a complete state")

    async def _visit_all(self, tasks: asyncio.TaskGroup) -> None:
        """Keeps visiting donors until the state is complete, or nobody is left to ask."""
        while True:
            if self._collection is not None and self._collection.assembly.complete:
                for visit, task in self._visits.items():
                    if not visit.fetching:
                        task.cancel()  # it waits in line, or has not been answered yet
                return
            while self._waiting and len(self._visits) < _MOST_VISITS and self._fetching < _PARALLEL:
                visit = Visit(self._endpoint, self._prefix, self._waiting.popleft(), self._version)
                self._visits[visit] = tasks.create_task(self._visit(visit))
            if not self._visits:
                return
            await self._news.wait()

    @property
    def _fetching(self) -> int:
        """Visits that give something, or may soon."""
        return sum(not visit.in_line for visit in self._visits)

    async def _think_again(self) -> None:
        """Everyone has been asked: those who were busy once more, and then those whose state is another one."""
        if self._busy:
            await asyncio.sleep(_BUSY_PAUSE * (1 + self._endpoint.random.random()))
            self._waiting.extend(self._busy)
            self._busy.clear()
        else:
            self._waiting.extend(self._unequal)
            self._unequal.clear()
            self._settled = False

    def _reject(self, collection: Collection, reason: str) -> None:
        """Its hashes are those that were named, but no codec makes such tensors."""
        self._collection, self._settled = None, False
        for donor in collection.donors:
            self._attempts[donor.text] = reason
            self._endpoint.events.emit(PeerRefused(donor.text, reason, "state"))

    async def _visit(self, visit: Visit) -> None:
        donor = visit.peer
        try:
            await visit.run(self._join, self._heard, self._news.ring)
        except Busy as error:
            self._attempts[donor.text] = str(error)
            self._busy.append(donor)
        except Unequal:
            self._attempts[donor.text] = "its state is not equal to the others'"
            self._unequal.append(donor)
        except (NetworkError, TimeoutError) as error:
            self._attempts[donor.text] = str(error) or "it fell silent"
            if visit.gave and donor not in self._second_chance:
                self._second_chance.add(donor)
                self._busy.append(donor)
        except OSError as error:
            self._attempts[donor.text] = f"what it gives cannot be kept here: {error}"
        except ValueError as error:
            self._attempts[donor.text] = str(error)
            self._endpoint.events.emit(PeerRefused(donor.text, str(error), "state"))
        finally:
            del self._visits[visit]
            self._news.ring()

    def _heard(self, others: Sequence[Holder]) -> None:
        """A donor in whose line this peer waits names others who have the state. Raises ValueError."""
        for other in others:
            check_addresses(other.addresses)
            if other.peer_id not in self._known and len(self._known) < _MOST_HEARSAY:
                self._known.add(other.peer_id)
                self._endpoint.learn(PeerInfo(other.peer_id, other.addresses))
                place = self._endpoint.random.randrange(len(self._waiting) + 1)
                self._waiting.insert(place, other.peer_id)

    def _join(self, manifest: bytes) -> Collection:
        """The collection that this manifest belongs to. Raises ValueError, or Unequal if it is of another state."""
        current = self._collection
        if current is not None and current.manifest == manifest:
            self._settled = True
            return current
        if self._settled:
            raise Unequal
        layout, outline = read_manifest(manifest, self._max_bytes)
        if self._version and outline.version != self._version:
            raise ValueError("a state of another version than the one that was asked for")
        if self._check is not None:
            self._check(outline)
        self._collection, self._settled = Collection(manifest, Assembly(layout, outline, self._spool)), True
        return self._collection


def _finish(collection: Collection) -> DownloadedState:
    assembly = collection.assembly
    return DownloadedState(
        version=assembly.outline.version,
        metadata=assembly.outline.metadata,
        contents=assembly.tensors(),
        donors=collection.donors,
        bytes=collection.received,
        manifest=collection.manifest,
        digests=tuple(digest for _, digest in sorted(assembly.arrived.items())),
        exact=assembly.outline.exact,
    )
