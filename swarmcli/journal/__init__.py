"""The local journal of a peer: SQLite, written by a thread of its own, readable by anyone at any time."""

from swarmcli.journal.describe import Line, describe, describe_sighting, megabytes, short
from swarmcli.journal.journal import JOURNAL_NAME, Journal, RunDescription
from swarmcli.journal.reader import JournalReader
from swarmcli.journal.recording import Recorder
from swarmcli.journal.records import (
    EpochRecord,
    EventRecord,
    PeerRecord,
    Record,
    ReportRecord,
    RoundRecord,
    RunRecord,
    SwarmLoss,
    Totals,
)
from swarmcli.journal.writer import JournalStatistics

__all__ = [
    "JOURNAL_NAME",
    "EpochRecord",
    "EventRecord",
    "Journal",
    "JournalReader",
    "JournalStatistics",
    "Line",
    "PeerRecord",
    "Record",
    "Recorder",
    "ReportRecord",
    "RoundRecord",
    "RunDescription",
    "RunRecord",
    "SwarmLoss",
    "Totals",
    "describe",
    "describe_sighting",
    "megabytes",
    "short",
]
