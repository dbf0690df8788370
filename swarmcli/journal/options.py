"""A journal's decisions: how much it keeps, and in which pieces it is written, trimmed and read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JournalOptions:
    """The terms of a journal. Peers decide how much there is to record; its size must not be theirs to decide."""

    size: int = 500_000_000  # bytes, unless its owner says otherwise, and …
    least_size: int = 10_000_000  # … whatever the owner says
    burst: float = 60.0  # lines about connections at once, and …
    lines_per_second: float = 1.0  # … in the long run: peers choose how often they connect and are refused
    # Rows of peers that appear and of their reports of epochs, which anybody can write in the hash table under ever new
    # identities: enough for a thousand trainers at an epoch a minute, and 140 MB a day at the most.
    report_burst: float = 8192.0
    reports_per_second: float = 16.0
    names: int = 4096  # of peers, that are remembered
    most_rows: int = 20_000  # of a table whose rows strangers can make at will, by ever new identities
    max_text: int = 2000  # characters kept of any text, for peers choose some of it
    rounds_counted: int = 500  # the last ones that failed or went on without somebody, of which people see the reasons
    moments: int = 2000  # rows of the finest scale; each coarser one reaches back twice as far, with half as many
    busy: float = 2.0  # seconds that a reader or writer waits for another writer, before a batch is put off
    interval: float = 0.5  # seconds from a record's arrival to its commit at most, while the disk works
    warn_again: float = 600.0  # seconds: a disk that is full every other second is one piece of news
    max_batch: int = 2000  # records in one transaction
    rows_read: int = 1000  # at once, of a list that is read whole
    rows_trimmed: int = 5000  # of a list in one transaction, so that nobody waits for long
    trims_at_once: int = 40  # transactions before records that wait are written again
    wal_bytes: int = 16_000_000  # that the file beside the journal keeps


JOURNAL = JournalOptions()
