"""Contributions of each identity to a run, as one who keeps count hands them out: its table, called a book, for
everybody, and one peer's row, signed, for a certificate.

Everything here is one writer's word. Its signature says whose word it is, to anyone and for good, and proves no more.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypeVar

import msgspec

from swarmcli.errors import NetworkError, UnknownMethod
from swarmcli.events import Booked, Contribution
from swarmcli.network import wire
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import Identity, PeerID, verify
from swarmcli.words import harmless

if TYPE_CHECKING:
    from swarmcli.optim import PeerReport
    from swarmcli.run.asking import ShownReport

logger = logging.getLogger(__name__)

BOOK, ENTRY = "run.signed_book", "run.contribution"
FORMAT = 1  # of a book
MOST_LINES = 1024  # of a book: with the longest texts 700 kB, and a message may have 1 MiB
MOST_WRITERS = 8  # whose books are read

_RunID = Annotated[str, msgspec.Meta(max_length=64)]
_Signature = Annotated[bytes, msgspec.Meta(max_length=64)]
_Amount = Annotated[float, msgspec.Meta(ge=0, lt=1e15)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_Text = Annotated[str, msgspec.Meta(max_length=64)]
Moment = Annotated[float, msgspec.Meta(ge=0, lt=1e11)]  # seconds since 1970, of which every program can make a date


class BookEntry(msgspec.Struct, frozen=True):
    """One identity's part, as it travels."""

    samples: _Amount = 0.0
    hours: _Amount = 0.0
    rounds: _Count = 0
    reduced_bytes: _Count = msgspec.field(default=0, name="reduced")
    uptime: _Amount = 0.0  # seconds
    first: Moment = 0.0  # 0: unknown
    last: Moment = 0.0
    name: _Text = ""
    team: _Text = ""

    @classmethod
    def of(cls, row: Booked) -> BookEntry:
        return cls(**{name: getattr(row, name) for name in cls.__struct_fields__})


Entries: TypeAlias = Mapping[str, BookEntry]  # by peer id
NOTHING = BookEntry()


class Mark(msgspec.Struct, frozen=True):
    """A place in the run: so many epochs, and the samples of all of them."""

    epoch: _Count = 0
    samples: _Count = 0


START = Mark()


class Book(msgspec.Struct, frozen=True):
    """A writer's word for what each has given until an epoch, who gave most first; `entries[i]` is of `peers[i]`.

    It comes over the writer's own connection. Peers of earlier versions want it signed, and know nothing of `since`.
    """

    run_id: _RunID
    run: _RunID  # the hash of the recipe, as in links
    writer: PeerID
    until: Mark  # with the samples of the whole run
    witnessed: _Amount  # samples of the rounds that it was in itself
    vouched: _Count  # others by whose word it has what it did not see; only an earlier version takes that over
    peers: Annotated[tuple[PeerID, ...], msgspec.Meta(max_length=MOST_LINES)]
    entries: Annotated[tuple[BookEntry, ...], msgspec.Meta(max_length=MOST_LINES)]
    time: Moment
    format: _Count = FORMAT
    signature: _Signature = b""
    since: _Count | msgspec.UnsetType = msgspec.UNSET  # the first epoch that it has counted, if that is not the run's

    @property
    def counted(self) -> float:
        """Returns which part of the run's samples the writer has counted itself."""
        return min(1.0, self.witnessed / max(1, self.until.samples))

    @property
    def in_words(self) -> str:
        """For people: "55% of the run's 98,000 samples, counted since epoch 40 up to epoch 90"."""
        since = f" since epoch {self.since:,}" if self.since else ""
        rest = "; the rest is another peer's word" if self.vouched else ""
        part = f"{self.counted:.0%} of the run's {self.until.samples:,} samples"
        return f"{part}, counted{since} up to epoch {self.until.epoch:,}{rest}"

    @property
    def lines(self) -> Entries:
        return {peer.text: entry for peer, entry in zip(self.peers, self.entries, strict=True)}

    def fault(self, writer: PeerID, run_id: str) -> str:
        """Why it is no book of this writer and run; "" if it is one."""
        if self.format != FORMAT:
            return f"its book is of format {self.format}, known here is {FORMAT}; update swarm"
        if (self.writer, self.run_id) != (writer, run_id):
            return "its book is of another peer or run"
        if not len(self.peers) == len(self.entries) == len(set(self.peers)):
            return "its book names a peer twice, or has lines of nobody"
        return ""


class Attestation(msgspec.Struct, frozen=True):
    """A writer's word for one identity's part. Of `peers` that have given samples it is the `rank`th; 0: none."""

    run_id: _RunID
    run: _RunID
    monitor: PeerID
    peer: PeerID
    entry: BookEntry
    rank: _Count
    peers: _Count
    until: Mark  # with the samples of the whole run
    vouched: _Count
    time: Moment
    signature: _Signature = b""
    since: _Count | msgspec.UnsetType = msgspec.UNSET  # as in its book


Signed = TypeVar("Signed", Book, Attestation)
_PURPOSES = {Book: "contributions book", Attestation: "contribution"}


def signed(identity: Identity, said: Signed) -> Signed:
    """The same with the signature of this identity, which is its author."""
    return msgspec.structs.replace(said, signature=identity.sign(_PURPOSES[type(said)], _unsigned(said)))


def is_signed(said: Attestation) -> bool:
    return verify(said.monitor, _PURPOSES[Attestation], said.signature, _unsigned(said))


def _unsigned(said: Book | Attestation) -> bytes:
    return wire.encode(msgspec.structs.replace(said, signature=b""))


# asking


class BookWanted(msgspec.Struct, frozen=True):
    """The first so many lines."""

    run_id: _RunID
    most: Annotated[int, msgspec.Meta(ge=0, le=MOST_LINES)] = MOST_LINES


class EntryWanted(msgspec.Struct, frozen=True):
    """Asks for one peer's entry. Peers of earlier versions do not ask since when it was counted: with that they would
    not find it signed."""

    run_id: _RunID
    peer: PeerID
    since: bool = False


def writers_among(reports: Mapping[PeerID, PeerReport] | Mapping[PeerID, ShownReport]) -> list[PeerID]:
    """Returns the peers that keep count by their reports: monitors first, then trainers that write checkpoints."""
    found = [peer for peer, its in reports.items() if its.role == "monitor" or (its.role == "trainer" and its.keeps)]
    return sorted(found, key=lambda peer: reports[peer].role != "monitor")


async def fetch_books(
    endpoint: Endpoint, writers: Sequence[PeerID], run_id: str, most: int = MOST_LINES
) -> tuple[dict[PeerID, Book], dict[PeerID, str]]:
    """The books of these writers, in their order; and who gave none that counts, and why."""

    async def ask(writer: PeerID) -> Book | str:
        try:
            book = await endpoint.call(writer, BOOK, BookWanted(run_id, most), Book, timeout=60.0)
        except UnknownMethod:
            return "it runs an older swarm, whose books are not read any more; update it"
        except NetworkError as error:
            return str(error)
        return book.fault(writer, run_id) or book

    told = dict(zip(writers, await asyncio.gather(*map(ask, writers)), strict=True))
    books = {writer: book for writer, book in told.items() if isinstance(book, Book)}
    return books, {writer: why for writer, why in told.items() if isinstance(why, str)}


def fullest(books: Mapping[PeerID, Book]) -> Book:
    """Returns the book whose writer has counted most of the run itself, the first one among equals."""
    return max(books.values(), key=lambda book: book.counted)


async def fetch_attestation(
    endpoint: Endpoint, writers: Sequence[PeerID], run_id: str, peer: PeerID, timeout: float
) -> Attestation | None:
    """Returns a peer's part, as the one of these writers signs it that has counted most of it; None: none answers."""

    async def ask(writer: PeerID) -> Attestation | None:
        try:
            wanted = EntryWanted(run_id, peer, since=True)
            said = await endpoint.call(writer, ENTRY, wanted, Attestation, timeout=timeout)
        except NetworkError as error:
            logger.debug("nothing of the part of %s from %s: %s", peer.short, writer.short, error)
            return None
        is_its = (said.monitor, said.run_id, said.peer) == (writer, run_id, peer) and is_signed(said)
        return said if is_its else None

    found = filter(None, await asyncio.gather(*map(ask, writers)))
    return max(found, key=lambda said: said.entry.samples, default=None)


# what is shown


def samples_of(entries: Entries) -> float:
    """Returns the samples of all entries together."""
    return math.fsum(entry.samples for entry in entries.values())


def listed(entries: Entries) -> list[Contribution]:
    """For people, most samples first; among equals who has added up or stayed more. An entry may have come from any
    writer just now, and its texts are a stranger's."""

    def place(item: tuple[str, BookEntry]) -> tuple[float, int, float, str]:
        return -item[1].samples, -item[1].reduced_bytes, -item[1].uptime, item[0]

    found = []
    for peer, entry in sorted(entries.items(), key=place):
        shown = {"samples": round(entry.samples), "name": harmless(entry.name), "team": harmless(entry.team)}
        found.append(Contribution(peer, **(msgspec.structs.asdict(entry) | shown)))
    return found
