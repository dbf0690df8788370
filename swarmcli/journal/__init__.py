"""The local journal of a peer: SQLite, written by a thread of its own, readable by anyone at any time."""

from swarmcli.journal.describe import Line, Recorder, describe, megabytes, printable, short
from swarmcli.journal.journal import JOURNAL_NAME, Journal
from swarmcli.journal.reader import JournalReader
from swarmcli.journal.tables import RunRecord, Totals
from swarmcli.journal.writer import JournalStatistics

__all__ = [
    "JOURNAL_NAME",
    "Journal",
    "JournalReader",
    "JournalStatistics",
    "Line",
    "Recorder",
    "RunRecord",
    "Totals",
    "describe",
    "megabytes",
    "printable",
    "short",
]
