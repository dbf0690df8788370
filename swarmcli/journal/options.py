"""A journal's decisions: how much it keeps, and in which pieces it is written, trimmed and read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JournalOptions:
    """The bounds of a journal. Other peers decide how much there is to record, and must not decide its size."""

    size: int = 500_000_000  # bytes, unless the user says otherwise, and …
    least_size: int = 10_000_000  # … at least, whatever the user says
    burst: float = 60.0  # lines about connections at once, and …
    lines_per_second: float = 1.0  # … in the long run: peers choose how often they connect and are refused
    # Rows of peers that appear, and of their reports of epochs. Anybody can write these in the hash table under ever
    # new identities. Enough for a thousand trainers at an epoch a minute, and at most 140 MB a day.
    report_burst: float = 8192.0
    reports_per_second: float = 16.0
    names: int = 4096  # of peers that are remembered
    most_rows: int = 20_000  # of a table in which strangers can make rows at will, by ever new identities
    max_text: int = 2000  # characters kept of any text, for peers choose some of it
    rounds_counted: int = 500  # last rounds that failed or went on without somebody, whose reasons people see
    moments: int = 2000  # rows of the finest scale; each coarser one reaches twice as far back, with half as many
    busy: float = 2.0  # seconds that a reader or writer waits for another writer, before it gives up for now
    interval: float = 0.5  # seconds from a record's arrival to its commit at most, while the disk works
    warn_again: float = 600.0  # seconds: a disk that is full again and again is one warning
    max_batch: int = 2000  # records in one transaction
    rows_read: int = 1000  # read at once of a list that is read whole
    rows_trimmed: int = 5000  # removed of a list in one transaction, so that nobody waits for long
    trims_at_once: int = 40  # of these transactions in a row, before records that wait are written
    wal_bytes: int = 16_000_000  # kept by the write-ahead log beside the journal


JOURNAL = JournalOptions()
