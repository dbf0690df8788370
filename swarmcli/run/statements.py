"""What monitors sign of a run's book, and how it travels: page by page to other monitors, an entry to whom it is of.

Everything here is one monitor's word. Its signature says whose word it is, to anyone and for good: in a certificate, or
against a monitor that told two peers two things.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

from swarmcli.network import wire
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import Identity, PeerID, verify
from swarmcli.run.contributions import MOST_ENTRIES, Entries, Entry, Mark, Moment, Told

BOOK, ENTRY = "run.book", "run.contribution"
ON_A_PAGE = 128  # entries: some 20 KiB
MOST_PAGES = MOST_ENTRIES // ON_A_PAGE
PAGE_SECONDS = 5.0
BOOK_SECONDS = 60.0

_RunID = Annotated[str, msgspec.Meta(max_length=64)]
_Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Signature = Annotated[bytes, msgspec.Meta(max_length=64)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class Statement(msgspec.Struct, frozen=True):
    """A monitor's word for a whole book, whose pages have this hash. `run`: the hash of the recipe, as in links."""

    run_id: _RunID
    run: _RunID
    until: Mark
    since: _Count
    vouched: _Count  # monitors by whose word it knows what it has not seen; 0: it has seen all itself, or knows no more
    witnessed: Annotated[float, msgspec.Meta(ge=0, lt=1e15)]  # samples of the rounds that it was in itself
    pages: Annotated[int, msgspec.Meta(ge=0, le=MOST_PAGES)]
    digest: _Hash
    time: Moment
    signature: _Signature = b""

    def is_of(self, monitor: PeerID) -> bool:
        return verify(monitor, "contributions", self.signature, _unsigned(self))


class Attestation(msgspec.Struct, frozen=True):
    """A monitor's word for one identity's part. Of `peers` that have given samples it is the `rank`th; 0: none."""

    run_id: _RunID
    run: _RunID
    monitor: PeerID
    peer: PeerID
    entry: Entry
    rank: _Count
    peers: _Count
    until: Mark  # with the samples of the whole run
    vouched: _Count
    time: Moment
    signature: _Signature = b""

    @property
    def is_signed(self) -> bool:
        return verify(self.monitor, "contribution", self.signature, _unsigned(self))


def signed(identity: Identity, statement: Statement) -> Statement:
    return msgspec.structs.replace(statement, signature=identity.sign("contributions", _unsigned(statement)))


def attested(identity: Identity, attestation: Attestation) -> Attestation:
    return msgspec.structs.replace(attestation, signature=identity.sign("contribution", _unsigned(attestation)))


def _unsigned(statement: Statement | Attestation) -> bytes:
    return wire.encode(msgspec.structs.replace(statement, signature=b""))


# on the wire


class BookWanted(msgspec.Struct, frozen=True):
    """A page of the book whose pages have this hash; of the newest one without."""

    run_id: _RunID
    page: _Count = 0
    digest: Annotated[bytes, msgspec.Meta(max_length=32)] = b""


class Page(msgspec.Struct, frozen=True):
    """Those who gave most come first, so the first page is a table of the best."""

    statement: Statement
    peers: Annotated[tuple[PeerID, ...], msgspec.Meta(max_length=ON_A_PAGE)]
    entries: Annotated[tuple[Entry, ...], msgspec.Meta(max_length=ON_A_PAGE)]


class EntryWanted(msgspec.Struct, frozen=True):
    run_id: _RunID
    peer: PeerID


class Pages:
    """A book as it was at one moment, cut and signed."""

    def __init__(
        self, identity: Identity, run_id: str, run: str, told: Told, *, vouched: int, witnessed: float, now: float
    ) -> None:
        """`now`: seconds since 1970."""
        ranked = sorted(told.entries.items(), key=lambda item: (*(-each for each in item[1].worth), item[0]))
        self.ranked = [(PeerID.parse(peer), entry) for peer, entry in ranked[:MOST_ENTRIES]]
        self.given = sum(entry.samples > 0 for _, entry in self.ranked)
        self._places = {peer: place for place, (peer, _) in enumerate(self.ranked)}
        self._identity = identity
        count = -(-len(self.ranked) // ON_A_PAGE)
        digest = digest_of([self._cut(number) for number in range(count)])
        self.statement = signed(
            identity, Statement(run_id, run, told.until, told.since, vouched, witnessed, count, digest, now)
        )

    def _cut(self, number: int) -> list[tuple[PeerID, Entry]]:
        return self.ranked[number * ON_A_PAGE : (number + 1) * ON_A_PAGE]

    def page(self, number: int) -> Page:
        """An empty one beyond the last."""
        cut = self._cut(number)
        return Page(self.statement, tuple(peer for peer, _ in cut), tuple(entry for _, entry in cut))

    def attestation(self, peer: PeerID) -> Attestation:
        """Of one that is not in the book: nothing."""
        place = self._places.get(peer)
        entry = Entry() if place is None else self.ranked[place][1]
        rank = 1 + place if place is not None and entry.samples > 0 else 0
        about = self.statement
        return attested(
            self._identity,
            Attestation(
                about.run_id,
                about.run,
                self._identity.peer_id,
                peer,
                entry,
                rank,
                self.given,
                about.until,
                about.vouched,
                about.time,
            ),
        )


def digest_of(pages: list[list[tuple[PeerID, Entry]]]) -> bytes:
    """32 bytes over all pages."""
    whole = hashlib.sha256(b"swarm book")
    for page in pages:
        whole.update(hashlib.sha256(wire.encode(page)).digest())
    return whole.digest()


# asking


async def fetch_book(endpoint: Endpoint, monitor: PeerID, run_id: str, *, most_pages: int = MOST_PAGES) -> Page:
    """All of a monitor's book on one page, or no more than its first pages: then the hash is not checked, and the book
    is good for a table. Raises NetworkError where the monitor does not answer, and ValueError for a book that is not
    what its signature says."""
    first = await _page(endpoint, monitor, BookWanted(run_id))
    statement, pages = first.statement, [list(zip(first.peers, first.entries, strict=False))]
    if not statement.is_of(monitor) or statement.run_id != run_id:
        raise ValueError("its book is not signed by it")
    for number in range(1, min(statement.pages, most_pages)):
        page = await _page(endpoint, monitor, BookWanted(run_id, number, statement.digest))
        pages.append(list(zip(page.peers, page.entries, strict=False)))
    signed = pages if statement.pages or pages[0] else []  # an empty book has no page
    if statement.pages <= most_pages and digest_of(signed) != statement.digest:
        raise ValueError("its book is another one than it has signed")
    peers, entries = zip(*(line for page in pages for line in page), strict=True) if any(pages) else ((), ())
    if len(set(peers)) != len(peers):
        raise ValueError("its book names a peer twice")
    return Page(statement, peers, entries)


async def _page(endpoint: Endpoint, monitor: PeerID, wanted: BookWanted) -> Page:
    return await endpoint.call(monitor, BOOK, wanted, Page, timeout=PAGE_SECONDS)


def entries_of(page: Page) -> Entries:
    return {peer.text: entry for peer, entry in zip(page.peers, page.entries, strict=True)}


def told_by(page: Page) -> Told:
    return Told(page.statement.until, page.statement.since, entries_of(page))


async def fetch_attestation(
    endpoint: Endpoint, monitor: PeerID, run_id: str, peer: PeerID, timeout: float
) -> Attestation:
    """Raises NetworkError, and ValueError for one that is not of this monitor, run and peer."""
    answer = await endpoint.call(monitor, ENTRY, EntryWanted(run_id, peer), Attestation, timeout=timeout)
    if (answer.monitor, answer.run_id, answer.peer) != (monitor, run_id, peer) or not answer.is_signed:
        raise ValueError("what it says is not signed by it, or of somebody else")
    return answer
