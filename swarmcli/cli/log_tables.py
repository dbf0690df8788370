"""The lists of `swarm log` for people: tables on a terminal, aligned columns in a pipe, nothing cut there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarmcli.cli.console import day, number, peers_of
from swarmcli.cli.local import in_columns
from swarmcli.events import EpochAdvanced, PeerSeen, RoundFinished
from swarmcli.journal import JournalReader, Line, RunRecord, printable
from swarmcli.journal.describe import with_names
from swarmcli.words import format_duration, format_size, plural


class Column(NamedTuple):
    """`style(record)` is for terminals only."""

    title: str
    text: Callable[[Any], str]
    right: bool = False
    style: Callable[[Any], str] = lambda record: ""


OUTCOMES = {"committed": "green", "failed": "red", "undecided": "yellow"}
LEVELS = {"detail": "dim", "warning": "yellow", "error": "red"}


def _explained(record: RoundFinished) -> str:
    left_out = [f"without {peer[:10]}: {reason}" for peer, reason in record.left_out.items()]
    return printable("; ".join(filter(None, [record.reason, *left_out])))


def _norm(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


COLUMNS: Mapping[str, Sequence[Column]] = {
    "epochs": (
        Column("time", lambda record: day(record.time)),
        Column("epoch", lambda record: str(record.epoch), right=True),
        Column("loss", lambda record: number(record.loss), right=True),
        Column("samples", lambda record: f"{record.samples:,}", right=True),
        Column("own", lambda record: f"{record.own_samples:,}", right=True),
        Column("peers", lambda record: str(record.peers), right=True),
        Column("took", lambda record: format_duration(record.seconds), right=True),
        Column("averaging", lambda record: format_duration(record.averaging_seconds), right=True),
        Column("gradient", lambda record: _norm(record.gradient_norm), right=True),
        Column("update", lambda record: _norm(record.update_norm), right=True),
    ),
    "rounds": (
        Column("time", lambda record: day(record.time)),
        Column("epoch", lambda record: str(record.epoch) if record.epoch >= 0 else "–", right=True),
        Column("what", lambda record: printable(record.purpose.rpartition("_")[2], 10)),
        Column(
            "outcome", lambda record: printable(record.outcome), style=lambda record: OUTCOMES.get(record.outcome, "")
        ),
        Column("peers", peers_of, right=True),
        Column("finding", lambda record: format_duration(record.seconds.get("looking for group", 0.0)), right=True),
        Column("took", lambda record: format_duration(record.duration), right=True),
        Column("sent", lambda record: format_size(record.bytes_sent), right=True),
        Column("received", lambda record: format_size(record.bytes_received), right=True),
        Column("why", _explained),
    ),
    "events": (
        Column("time", lambda record: day(record.time)),
        Column("level", lambda record: record.level, style=lambda record: LEVELS.get(record.level, "")),
        Column("what", lambda record: printable(record.text)),
    ),
    "peers": (
        Column("peer", lambda record: record.peer[:10]),
        Column("name", lambda record: printable(record.name, 40)),
        Column("role", lambda record: printable(record.role, 20)),
        Column("epoch", lambda record: str(record.epoch), right=True),
        Column("samples/s", lambda record: f"{record.samples_per_second:,.1f}", right=True),
        Column("first seen", lambda record: day(record.first_seen)),
        Column("last seen", lambda record: day(record.time)),
        Column("", lambda record: record.gone, style=lambda record: "dim"),
    ),
}


def print_table(
    console: Console,
    name: str,
    records: Sequence[EpochAdvanced | RoundFinished | Line | PeerSeen],
    names: Mapping[str, str],
) -> None:
    """One list, with a heading. An empty one says so. `names`: by short ids, which they stand beside."""
    if not records:
        console.print(f"no {name} yet")
    elif console.is_terminal:
        console.print(_terminal_table(name, records, names))
    else:
        _print_plain(console, name, records, names)


def _terminal_table(name: str, records: Sequence[Any], names: Mapping[str, str]) -> Table:
    columns = COLUMNS[name]
    table = Table(title=name, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column.title, justify="right" if column.right else "left")
    for record in records:
        cells = [(with_names(column.text(record), names), column.style(record)) for column in columns]
        table.add_row(*(Text(text, style=style) for text, style in cells))
    return table


def _print_plain(console: Console, name: str, records: Sequence[Any], names: Mapping[str, str]) -> None:
    columns = COLUMNS[name]
    rows = ([with_names(column.text(record), names) for column in columns] for record in records)
    cells = [[column.title for column in columns], *rows]
    for line in in_columns(cells, right=[n for n, column in enumerate(columns) if column.right]):
        console.print(line, soft_wrap=True)


def print_summary(console: Console, reader: JournalReader, runs: Sequence[RunRecord], now: float) -> None:
    """The last run in the journal, in a few lines."""
    run = runs[-1]
    starts = sum(each.run_id == run.run_id for each in runs)
    again = f", for the {starts}th time" if starts > 3 else f", {starts} starts" if starts > 1 else ""
    console.print(Text(f"{printable(run.run_id)}  {run.role} {printable(run.name or run.peer[:10], 40)}", style="bold"))
    facts = [
        ("journal", str(reader.path)),
        ("peer", run.peer),
        ("started", f"{day(run.started)}{again}"),
        ("state", _state(run, now)),
        *_epoch_facts(reader, run),
        *_round_facts(reader, run.run_id),
        *_peer_facts(reader, run, now),
    ]
    for label, text in facts:
        console.print(Text(f"  {label:<8} ", style="dim").append(text, style="not dim"), soft_wrap=True)


def _state(run: RunRecord, now: float) -> str:
    if run.finished is not None:
        return (
            f"ended {day(run.finished)} after {format_duration(run.finished - run.started)}: {printable(run.outcome)}"
        )
    if run.goes_on(now):
        return f"running for {format_duration(max(0.0, now - run.started))} (process {run.pid})"
    return f"stopped without closing the journal; its last sign of life is of {day(run.last_seen)}"


def _epoch_facts(reader: JournalReader, run: RunRecord) -> list[tuple[str, str]]:
    epochs = reader.epochs(run.run_id)
    if not epochs:
        return [("epochs", "none yet")]
    losses = [epoch.loss for epoch in epochs if epoch.loss is not None]
    known = losses or [epoch.loss for epoch in reader.chart(run.run_id) if epoch.loss is not None]
    facts = [("epochs", f"{epochs[0].epoch} to {epochs[-1].epoch}")]
    if known:
        whose = "" if losses else " (as the others report it)"
        facts.append(("loss", f"{number(known[0])} → {number(known[-1])}{whose}"))
    _, book = reader.book(run.run_id)  # knows of epochs that passed while this peer was away; is written a while later
    own = max(sum(each.own_samples for each in epochs), sum(each.samples for each in book if each.peer == run.peer))
    everyone = max(sum(each.samples for each in epochs), sum(each.samples for each in book))
    whose = f"{own:,.0f} of {everyone:,.0f} are this peer's" if own else f"{everyone:,.0f}, all of other peers"
    facts.append(("samples", whose))
    return facts


def _round_facts(reader: JournalReader, run_id: str) -> list[tuple[str, str]]:
    totals = reader.totals(run_id)
    counts = f"{totals.rounds_committed} committed, {totals.rounds_failed} failed, {totals.rounds_undecided} undecided"
    facts = [("rounds", counts)]
    reasons = Counter(round_.reason for round_ in reader.rounds(run_id) if round_.outcome != "committed")
    for reason, times in reasons.most_common(5):
        facts.append(("", f"{times} × {printable(reason) or 'no reason given'}"))
    facts.append(("moved", f"{format_size(totals.bytes_sent)} sent, {format_size(totals.bytes_received)} received"))
    return facts


def _peer_facts(reader: JournalReader, run: RunRecord, now: float) -> list[tuple[str, str]]:
    peers = reader.peers(run.run_id)
    if not peers:
        return [("peers", "none seen")]
    here = sum(not _gone(peer, run) for peer in peers)
    facts = [("peers", f"{plural(len(peers), 'peer')} seen, {here} there {_as_of(run, now)}")]
    shown = peers[:8]
    for peer in shown:
        name = printable(peer.name or peer.peer[:10], 40)
        facts.append(("", f"{name}, {printable(peer.role, 20)}, epoch {peer.epoch}{_gone(peer, run)}"))
    if len(peers) > len(shown):
        facts.append(("", f"and {len(peers) - len(shown)} more (--peers)"))
    return facts


def _gone(peer: PeerSeen, run: RunRecord) -> str:
    """A killed peer does not sign off, and if the journal's owner was away then, nobody noted that the peer left. One
    that was seen last a minute before the journal's last sign of life may well be gone."""
    if peer.gone:
        return f", {peer.gone}"
    silent = run.last_seen - peer.time > 60
    return f", not heard of since {day(peer.time)}" if silent else ""


def _as_of(run: RunRecord, now: float) -> str:
    if run.finished is not None:
        return "at the end"
    return "now" if run.goes_on(now) else "when it was last written"
