"""The local journal of a peer: SQLite, written by a thread of its own, readable by anyone at any time."""

from swarmcli.journal.describe import Line, Recorder, printable, short
from swarmcli.journal.failures import Failure
from swarmcli.journal.journal import JOURNAL_NAME, Journal
from swarmcli.journal.moments import Axis, Moment
from swarmcli.journal.reader import JournalReader
from swarmcli.journal.tables import RunRecord, Totals

__all__ = [
    "JOURNAL_NAME",
    "Axis",
    "Failure",
    "Journal",
    "JournalReader",
    "Line",
    "Moment",
    "Recorder",
    "RunRecord",
    "Totals",
    "printable",
    "short",
]
