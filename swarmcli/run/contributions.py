"""Contributions of each identity to a run, as somebody who keeps count signs them: a book for everybody, and one peer's
part for a certificate.

Everything here is one writer's word. Its signature says whose word it is, to anyone and for good, and proves no more.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable, Mapping
from statistics import median_low
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
NUMBERS = ("samples", "hours", "rounds", "reduced_bytes", "uptime")
NOTHING = BookEntry()


class Mark(msgspec.Struct, frozen=True):
    """A place in the run: so many epochs, and the samples of all of them."""

    epoch: _Count = 0
    samples: _Count = 0


START = Mark()


class Book(msgspec.Struct, frozen=True):
    """A writer's word for what each has given until an epoch, who gave most first; `entries[i]` is of `peers[i]`."""

    run_id: _RunID
    run: _RunID  # the hash of the recipe, as in links
    writer: PeerID
    until: Mark  # with the samples of the whole run
    witnessed: _Amount  # samples of the rounds that it was in itself
    vouched: _Count  # writers by whose word it knows the rest
    peers: Annotated[tuple[PeerID, ...], msgspec.Meta(max_length=MOST_LINES)]
    entries: Annotated[tuple[BookEntry, ...], msgspec.Meta(max_length=MOST_LINES)]
    time: Moment
    format: _Count = FORMAT
    signature: _Signature = b""

    @property
    def lines(self) -> Entries:
        return {peer.text: entry for peer, entry in zip(self.peers, self.entries, strict=True)}

    def fault(self, writer: PeerID, run_id: str) -> str:
        """Why it is no book of this writer and run; "" if it is one."""
        if self.format != FORMAT:
            return f"its book is of format {self.format}, known here is {FORMAT}; update swarm"
        if (self.writer, self.run_id) != (writer, run_id) or not is_signed(self):
            return "its book is not signed by it"
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


Signed = TypeVar("Signed", Book, Attestation)
_PURPOSES = {Book: "contributions book", Attestation: "contribution"}


def signed(identity: Identity, said: Signed) -> Signed:
    """The same with the signature of this identity, which is its author."""
    return msgspec.structs.replace(said, signature=identity.sign(_PURPOSES[type(said)], _unsigned(said)))


def is_signed(said: Book | Attestation) -> bool:
    author = said.writer if isinstance(said, Book) else said.monitor
    return verify(author, _PURPOSES[type(said)], said.signature, _unsigned(said))


def _unsigned(said: Book | Attestation) -> bytes:
    return wire.encode(msgspec.structs.replace(said, signature=b""))


# asking


class BookWanted(msgspec.Struct, frozen=True):
    """The first so many lines."""

    run_id: _RunID
    most: Annotated[int, msgspec.Meta(ge=0, le=MOST_LINES)] = MOST_LINES


class EntryWanted(msgspec.Struct, frozen=True):
    """Asks for one peer's entry."""

    run_id: _RunID
    peer: PeerID


def writers_among(reports: Mapping[PeerID, PeerReport] | Mapping[PeerID, ShownReport]) -> list[PeerID]:
    """Returns the peers that keep count by their reports: monitors first, then trainers that write checkpoints."""
    found = [peer for peer, its in reports.items() if its.role == "monitor" or (its.role == "trainer" and its.keeps)]
    return sorted(found, key=lambda peer: reports[peer].role != "monitor")


async def fetch_books(
    endpoint: Endpoint, writers: Iterable[PeerID], run_id: str, most: int = MOST_LINES
) -> tuple[dict[PeerID, Book], dict[PeerID, str]]:
    """The books of these writers; and who gave none that counts, and why."""
    books: dict[PeerID, Book] = {}
    failed: dict[PeerID, str] = {}

    async def ask(writer: PeerID) -> None:
        try:
            book = await endpoint.call(writer, BOOK, BookWanted(run_id, most), Book, timeout=60.0)
        except UnknownMethod:
            failed[writer] = "it runs an older swarm, whose books are not read any more; update it"
        except NetworkError as error:
            failed[writer] = str(error)
        else:
            if fault := book.fault(writer, run_id):
                failed[writer] = fault
            else:
                books[writer] = book

    await asyncio.gather(*map(ask, sorted(writers)))
    return books, failed


async def fetch_attestation(
    endpoint: Endpoint, writer: PeerID, run_id: str, peer: PeerID, timeout: float
) -> Attestation:
    """Raises NetworkError, and ValueError for one that is not of this writer, run and peer."""
    answer = await endpoint.call(writer, ENTRY, EntryWanted(run_id, peer), Attestation, timeout=timeout)
    if (answer.monitor, answer.run_id, answer.peer) != (writer, run_id, peer) or not is_signed(answer):
        raise ValueError("what it says is not signed by it, or of somebody else")
    return answer


# what holds


def samples_of(entries: Entries) -> float:
    """Returns the samples of all entries together."""
    return math.fsum(entry.samples for entry in entries.values())


def most_samples(mark: Mark, exact: bool) -> float:
    """How many all together may have. `exact`: the run's lineage counts what its rounds count, and rounds each epoch's.
    Otherwise (local updates, several groups an epoch) it counts epochs, and says roughly how many there were."""
    return mark.samples + 0.5 * mark.epoch if exact else 2.0 * mark.samples


def agreed(books: Collection[Book]) -> dict[str, BookEntry]:
    """Merges books for a reader: of three and more it takes the lower median of each number, of two the book that
    counts more samples."""
    voices: list[Entries] = [book.lines for book in books]
    if len(voices) < 3:
        return dict(sorted(voices, key=samples_of)[-1]) if voices else {}
    # One that came late and knows little has no say. By the second fullest: one that invents samples would otherwise
    # leave itself as the only one with a say.
    least = sorted(map(samples_of, voices))[-2] / 2
    voices = [voice for voice in voices if samples_of(voice) >= least]
    found: dict[str, BookEntry] = {}
    for peer in dict.fromkeys(peer for voice in voices for peer in voice):
        entries = [voice.get(peer, NOTHING) for voice in voices]
        numbers = {number: median_low([getattr(entry, number) for entry in entries]) for number in NUMBERS}
        if any(numbers.values()):
            told = next((entry for entry in entries if entry.name or entry.last), NOTHING)
            found[peer] = msgspec.structs.replace(told, **numbers)
    return found


def greater(held: Entries, told: Entries) -> dict[str, BookEntry]:
    """Takes of each number of each peer the greater one."""
    found = dict(held)
    for peer, entry in told.items():
        mine = held.get(peer, NOTHING)
        numbers = {number: max(getattr(mine, number), getattr(entry, number)) for number in NUMBERS}
        found[peer] = msgspec.structs.replace(entry, **numbers)
    return found


def less(entry: BookEntry, held: BookEntry) -> dict[str, float]:
    """Each number less that of another entry."""
    return {number: getattr(entry, number) - getattr(held, number) for number in NUMBERS}


def distance(some: Entries, others: Entries) -> float:
    """By how many samples two books differ."""
    peers = some.keys() | others.keys()
    return math.fsum(abs(some.get(peer, NOTHING).samples - others.get(peer, NOTHING).samples) for peer in peers)


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
