"""What each peer has contributed to a run, as a peer that keeps count hands it out: its table, for everybody, and one
peer's row of it, signed, for a certificate.

Everything here is the word of one peer that keeps count (a writer). Its signature proves to anyone that the writer said
so, and no more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec

from swarmcli.errors import NetworkError
from swarmcli.events import Contribution
from swarmcli.network import wire
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import Identity, PeerID, verify
from swarmcli.words import harmless

if TYPE_CHECKING:
    from swarmcli.optim import PeerReport
    from swarmcli.run.asking import VisitorReport

logger = logging.getLogger(__name__)

TABLE, ROW = "run.contributions", "run.contribution"
MOST_ROWS = 1024  # rows of a table: with the longest texts 700 kB, and a message may have 1 MiB
MOST_WRITERS = 8  # peers whose tables are read

_RunID = Annotated[str, msgspec.Meta(max_length=64)]
_Signature = Annotated[bytes, msgspec.Meta(max_length=64)]
_Amount = Annotated[float, msgspec.Meta(ge=0, lt=1e15)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_Text = Annotated[str, msgspec.Meta(max_length=64)]
Moment = Annotated[float, msgspec.Meta(ge=0, lt=1e11)]  # seconds since 1970, of which every program can make a date


class ContributionRow(msgspec.Struct, frozen=True):
    """One peer's contribution, as it travels."""

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
    def of(cls, given: Contribution) -> ContributionRow:
        return cls(**{name: getattr(given, name) for name in cls.__struct_fields__})

    def shown(self, peer: str) -> Contribution:
        """Returns the row for people: a writer may have just sent it, and its texts are a stranger's."""
        texts = {"name": harmless(self.name), "team": harmless(self.team)}
        return whole(Contribution(peer, **(msgspec.structs.asdict(self) | texts)))


def whole(given: Contribution) -> Contribution:
    """Returns the same with whole samples, as people read them: rounds count fractions."""
    return replace(given, samples=round(given.samples))


class Mark(msgspec.Struct, frozen=True):
    """A place in the run: an epoch, and the samples of all epochs up to it."""

    epoch: _Count = 0
    samples: _Count = 0


class ContributionTable(msgspec.Struct, frozen=True):
    """What each peer has given up to an epoch, by a writer's word; who gave most comes first. `rows[i]` is of
    `peers[i]`. The table is not signed: it comes over the writer's own connection."""

    run_id: _RunID
    until: Mark  # with the samples of the whole run
    since: _Count  # the first epoch that the writer has counted; 0: the run's first
    samples: _Amount  # of everybody in the table, also of those whose rows do not fit
    peers: Annotated[tuple[PeerID, ...], msgspec.Meta(max_length=MOST_ROWS)]
    rows: Annotated[tuple[ContributionRow, ...], msgspec.Meta(max_length=MOST_ROWS)]

    @property
    def counted(self) -> float:
        """Which part of the run's samples the writer has counted, 0 to 1."""
        return min(1.0, self.samples / max(1, self.until.samples))

    @property
    def in_words(self) -> str:
        """For people: "55% of the 98,000 samples up to epoch 90, counted since epoch 40"."""
        since = f", counted since epoch {self.since:,}" if self.since > 1 else ""
        return f"{self.counted:.0%} of the {self.until.samples:,} samples up to epoch {self.until.epoch:,}{since}"

    def agrees(self, other: ContributionTable) -> bool:
        """Whether both tell of the same samples. Hours and moments always differ: each writer saw the peers at other
        times."""
        return self._samples() == other._samples()

    def _samples(self) -> dict[PeerID, int]:
        return {peer: round(row.samples) for peer, row in zip(self.peers, self.rows, strict=True) if row.samples}

    @property
    def listed(self) -> list[Contribution]:
        return [row.shown(peer.text) for peer, row in zip(self.peers, self.rows, strict=True)]


class Attestation(msgspec.Struct, frozen=True):
    """A row that its writer has signed. The peer is the `rank`th of `peers` that have given samples; 0: it gave none.

    Its fields stay as they are: with a further one the signatures in certificates of earlier versions would not verify.
    """

    run_id: _RunID
    run: _RunID  # the hash of the recipe, as in links
    monitor: PeerID
    peer: PeerID
    entry: ContributionRow
    rank: _Count
    peers: _Count
    until: Mark  # with the samples of the whole run
    vouched: _Count  # 0; in earlier versions, how many others' words were in it
    time: Moment
    signature: _Signature = b""
    since: _Count | msgspec.UnsetType = msgspec.UNSET  # the first epoch that was counted, unless it is the run's first

    def signed(self, identity: Identity) -> Attestation:
        return msgspec.structs.replace(self, signature=identity.sign("contribution", self._unsigned()))

    @property
    def is_signed(self) -> bool:
        return verify(self.monitor, "contribution", self.signature, self._unsigned())

    def _unsigned(self) -> bytes:
        return wire.encode(msgspec.structs.replace(self, signature=b""))


# asking


class TableWanted(msgspec.Struct, frozen=True):
    """Asks for the first `most` rows."""

    run_id: _RunID
    most: Annotated[int, msgspec.Meta(ge=0, le=MOST_ROWS)] = MOST_ROWS


class RowWanted(msgspec.Struct, frozen=True):
    run_id: _RunID
    peer: PeerID


Tables: TypeAlias = Mapping[PeerID, ContributionTable | str]  # by writer; a text says why there is no table


def writers_among(reports: Mapping[PeerID, PeerReport] | Mapping[PeerID, VisitorReport]) -> list[PeerID]:
    """Returns the peers that by their reports keep count: monitors first, then trainers that write checkpoints."""
    found = [peer for peer, its in reports.items() if its.role == "monitor" or (its.role == "trainer" and its.keeps)]
    return sorted(found, key=lambda peer: reports[peer].role != "monitor")[:MOST_WRITERS]


async def fetch_tables(endpoint: Endpoint, writers: Sequence[PeerID], run_id: str, most: int = MOST_ROWS) -> Tables:
    """Asks these writers; returns their answers in the same order."""

    async def ask(writer: PeerID) -> ContributionTable | str:
        try:
            table = await endpoint.call(writer, TABLE, TableWanted(run_id, most), ContributionTable, timeout=60.0)
        except NetworkError as error:
            return str(error)
        if table.run_id != run_id or not len(table.peers) == len(table.rows) == len(set(table.peers)):
            return "its table is of another run, names a peer twice, or has rows of nobody"
        return table

    return dict(zip(writers, await asyncio.gather(*map(ask, writers)), strict=True))


def fullest(tables: Tables) -> tuple[PeerID, ContributionTable] | None:
    """Returns the table whose writer has counted most of the run; among equals the first."""
    return max(told(tables), key=lambda found: found[1].counted, default=None)


def told(tables: Tables) -> Iterator[tuple[PeerID, ContributionTable]]:
    return ((writer, table) for writer, table in tables.items() if isinstance(table, ContributionTable))


def whose_count(tables: Tables, called: Callable[[PeerID], str]) -> list[str]:
    """Says whose table is shown, who counts otherwise, and who did not tell. `called`: the name of a peer for
    people."""
    failed = [  # errors name a peer by its id, first; here it is named already
        f"{called(peer)} did not tell what it counts ({why.removeprefix(f'{peer.short} ')})."
        for peer, why in tables.items()
        if isinstance(why, str)
    ]
    if (found := fullest(tables)) is None:
        return ["no monitor of this run could be asked; `swarm monitor` starts one, which counts from then on", *failed]
    shown, table = found
    unlike = [
        f"{called(writer)} counts {'the same' if table.agrees(other) else f'otherwise: {other.in_words}'}."
        for writer, other in told(tables)
        if writer != shown
    ]
    alone = "" if unlike else "; no other peer confirms it"
    return [f"This is the count of {called(shown)}: {table.in_words}{alone}.", *unlike, *failed]


async def fetch_attestation(
    endpoint: Endpoint, writers: Sequence[PeerID], run_id: str, peer: PeerID, timeout: float
) -> Attestation | None:
    """Returns a peer's row, signed by the one of these writers that has counted most of the peer's samples; None: none
    answers."""

    async def ask(writer: PeerID) -> Attestation | None:
        try:
            said = await endpoint.call(writer, ROW, RowWanted(run_id, peer), Attestation, timeout=timeout)
        except NetworkError as error:
            logger.debug("no row of %s from %s: %s", peer.short, writer.short, error)
            return None
        return said if (said.monitor, said.run_id, said.peer) == (writer, run_id, peer) and said.is_signed else None

    found = filter(None, await asyncio.gather(*map(ask, writers)))
    return max(found, key=lambda said: said.entry.samples, default=None)
