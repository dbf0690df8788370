"""`swarm log` says in a few lines how a run went."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from swarmcli.cli.console import day, number
from swarmcli.events import PeerSeen
from swarmcli.journal import JournalReader, RunRecord, printable
from swarmcli.words import format_duration, format_size, plural


def print_summary(console: Console, reader: JournalReader, runs: Sequence[RunRecord], now: float) -> None:
    """Prints a few lines about the last run in the journal."""
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
    return f"stopped without closing the journal; it was last written on {day(run.last_seen)}"


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
    book = reader.contributions(
        run.run_id
    )  # also has epochs that passed while this peer was away, but is written a while later
    own = max(sum(each.own_samples for each in epochs), sum(each.samples for each in book if each.peer == run.peer))
    everyone = max(sum(each.samples for each in epochs), sum(each.samples for each in book))
    whose = f"{own:,.0f} of {everyone:,.0f} are this peer's" if own else f"{everyone:,.0f}, all of other peers"
    facts.append(("samples", whose))
    return facts


def _round_facts(reader: JournalReader, run_id: str) -> list[tuple[str, str]]:
    totals = reader.totals(run_id)
    counts = f"{totals.rounds_committed} committed, {totals.rounds_failed} failed, {totals.rounds_undecided} undecided"
    facts = [("rounds", counts)]
    failures = [each for each in reader.failures(run_id) if each.what == "round"]
    facts += [("", f"{each.count} × {printable(each.example)}") for each in failures[:5]]
    facts.append(("bytes", f"{format_size(totals.bytes_sent)} sent, {format_size(totals.bytes_received)} received"))
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
    """A killed peer does not sign off, and if the journal's owner was away then, nobody noted that the peer left. A
    peer that was last seen a minute before the journal's last sign of life may well be gone."""
    if peer.gone:
        return f", {peer.gone}"
    silent = run.last_seen - peer.time > 60
    return f", not heard of since {day(peer.time)}" if silent else ""


def _as_of(run: RunRecord, now: float) -> str:
    if run.finished is not None:
        return "at the end"
    return "now" if run.goes_on(now) else "when it was last written"
