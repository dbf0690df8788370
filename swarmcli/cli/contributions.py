"""Shows on the terminal what each peer has given: the table of `swarm members`, the last line of `swarm join`, and
`swarm certificate`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from swarmcli.cli.console import day, err, out, plain_table
from swarmcli.cli.which import contacts_of, homes_of, only
from swarmcli.errors import SwarmError, UsageError
from swarmcli.events import Contribution
from swarmcli.journal import printable, short
from swarmcli.words import format_duration, format_size, plural

if TYPE_CHECKING:
    from swarmcli.network.identity import Identity, PeerID
    from swarmcli.peer.peer import Summary
    from swarmcli.run.asking import AskedTables
    from swarmcli.run.certificate import ContributionCertificate
    from swarmcli.run.contributions import Attestation

CLAIMED, SEEN = ("samples", "hours"), ("rounds", "reduced_bytes", "uptime")
LEGEND = "claimed: the peer says so, others accepted it; nobody can prove it. seen: by the peer whose count this is."


# the list


@dataclass(frozen=True, slots=True)
class Told:
    """The result of asking. `rests_on`: whose count it is, in lines; `details`: of the peers that keep count, for
    JSON."""

    run_id: str
    contributions: Sequence[Contribution]
    rests_on: Sequence[str]
    details: dict[str, Any]

    @property
    def _ordered(self) -> Sequence[Contribution]:
        return sorted(self.contributions, key=lambda each: -each.samples)

    def print(self) -> None:
        """Prints the table, and whose count it is."""
        if self.contributions:
            narrow = out.width < 79  # columns: beside a name only the samples have room
            out.print(contributions_table(self._ordered, narrow=narrow))
            err.print(f"\n{LEGEND}")
        for line in self.rests_on:
            err.print(printable(line, 400))

    def as_json(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "claimed": CLAIMED,
            "seen": SEEN,
            "contributions": [_plain(each) for each in self._ordered],
        } | self.details


def _plain(each: Contribution) -> dict[str, Any]:
    return {name: value for name, value in asdict(each).items() if name not in ("time", "id", "run_id")}


NUMERIC = (
    "samples\nclaimed",
    "share",
    "time\nclaimed",
    "rounds\nseen",
    "added up\nseen",
    "there\nseen",
)


def contributions_table(shown: Sequence[Contribution], *, narrow: bool = False) -> Table:
    """`narrow`: only the columns that are read first, so that nothing is cut."""
    table, total = plain_table(), sum(each.samples for each in shown)
    for column in ("", "peer") if narrow else ("", "peer", "team"):
        table.add_column(column, no_wrap=True)
    for column in NUMERIC[:2] if narrow else NUMERIC:
        table.add_column(column, justify="right", no_wrap=True)
    ahead = sorted(each.samples for each in shown)
    for each in shown:
        place = len(ahead) - bisect_right(ahead, each.samples) + 1  # equals share one; who gave no samples has none
        who = str(place) if each.samples else "–", _called(each)
        given = f"{each.samples:,.0f}", f"{each.samples / total:.0%}" if total else ""
        if narrow:
            table.add_row(*who, *given)
            continue
        table.add_row(
            *who,
            printable(each.team, 16),
            *given,
            format_duration(3600 * each.hours),
            f"{each.rounds:,}",
            format_size(each.reduced_bytes),
            format_duration(each.uptime),
        )
    return table


def _called(each: Contribution) -> Text:
    name = printable(each.name, 20)
    return Text.assemble(name, (f" {short(each.peer)[:6]}", "dim")) if name else Text(short(each.peer))


def told_by(asked: AskedTables) -> Told:
    """Returns the table of a peer that keeps count, and says who counts otherwise."""
    from swarmcli.run.contributions import fullest, told, whose_count

    def called(peer: PeerID) -> str:
        report = asked.present.get(peer)
        named = report is not None and report.name and not peer.text.startswith(report.name)
        return f"{report.name} {short(peer.text)[:6]}" if report is not None and named else short(peer.text)

    why_not = {peer.text: why for peer, why in asked.tables.items() if isinstance(why, str)}
    lines, found = whose_count(asked.tables, called), fullest(asked.tables)
    if found is None:
        return Told(asked.run_id, [], lines, {"accounted": 0.0, "monitors": [], "failed": why_not})
    shown, table = found
    monitors = [
        {
            "peer": writer.text,
            "shown": writer == shown,
            "since": each.since,
            **{"epoch": each.until.epoch, "samples": each.until.samples, "witnessed": each.samples},
        }
        for writer, each in told(asked.tables)
    ]
    accounted = sum(each.samples for each in table.listed) / max(1, table.until.samples)
    details = {"accounted": accounted, "monitors": monitors, "failed": why_not}
    return Told(asked.run_id, table.listed, lines, details)


# the last line of a peer


def thanks(summary: Summary, standing: Attestation | None) -> str:
    """Says in a line what this peer has given; "" for nothing. `standing`: a monitor's word; None: no monitor could be
    asked, and the line tells the peer's own count of this start."""
    if standing is None:
        if not summary.samples:
            return ""
        return f"{summary.samples:,} samples by this peer's own count, since no monitor answered; thank you"
    entry, given = standing.entry, []
    if entry.samples >= 1:
        since = f" (counted since epoch {standing.since:,})" if standing.since else ""
        given.append(f"{entry.samples:,.0f} of {standing.until.samples:,} samples{since}")
    elif entry.reduced_bytes:
        given.append(f"{format_size(entry.reduced_bytes)} added up for others in {plural(entry.rounds, 'round')}")
    if not given:
        return ""
    given.append(format_duration(3600 * entry.hours))
    if standing.rank and standing.peers > 1:
        given.append(f"place {standing.rank:,} of {standing.peers:,}")
    rest = summary.samples - round(entry.samples)
    fewer = f"; it has not counted {rest:,} of this start: above a round's cap, or not seen" if rest > 0 else ""
    return f"you gave in all: {', '.join(given)}, by the count of {standing.monitor.short}{fewer}; thank you"


# certificates

certificate = typer.Typer(
    help="Write a certificate of what you gave, signed by a monitor of the run.",
    epilog="Example: swarm certificate --for 'Ada Lovelace' --out ada.json; then: swarm certificate verify ada.json",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="rich",
)


@certificate.callback()
def write(
    ctx: typer.Context,
    home: Annotated[
        Path | None,
        typer.Option(
            "--home",
            metavar="DIR",
            help="The peer's directory. Default: that of your only trainer or auxiliary on this computer, or of the "
            "only one that runs.",
        ),
    ] = None,
    to: Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write.")] = Path("certificate.json"),
    whom: Annotated[str, typer.Option("--for", metavar="TEXT", help="Whose it is, for example your name.")] = "",
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", metavar="ADDRESS", help="A peer of the run, by which its monitors are found."),
    ] = None,
) -> None:
    """Write a certificate of what you gave, signed by a monitor of the run."""
    if ctx.invoked_subcommand is not None:
        return
    from swarmcli.run.certificate import ContributionCertificate

    directory = home if home is not None else only_home()
    identity = _identity(directory)
    said = _attestation(directory, identity, peer or [])
    if said is None:
        raise SwarmError(
            f"no monitor of the run could be asked, and none was when the peer in {directory} last left; try again "
            "when the run goes on, or name one of its peers with --peer"
        )
    own = identity if identity is not None and identity.peer_id == said.peer else None
    made = ContributionCertificate.make(said, own, whom[:200])
    if made.fault:
        raise SwarmError(f"no certificate was written: {made.fault}")
    made.write(to)
    for line in in_words(made):
        out.print(printable(line, 400))
    err.print(f"wrote {to}; anybody can check it with: swarm certificate verify {to}")


@certificate.command("verify")
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The certificate.")],
) -> None:
    """Check the signature of a certificate, which is JSON, and say whose word it is. Needs no network.

    \b
    swarm certificate verify ada.json
    """
    from swarmcli.run.certificate import ContributionCertificate

    found = ContributionCertificate.read(file)
    if found.fault:
        raise SwarmError(f"{file} does not hold: {found.fault}")
    for line in in_words(found):
        out.print(printable(line, 400))


def in_words(made: ContributionCertificate) -> list[str]:
    """Tells what a certificate says, whose word it is, and what it does not prove."""
    first = made.attestations[0]
    name = f"{first.entry.name}, " if first.entry.name else ""
    whose = f"{made.whom}: " if made.whom else ""
    lines = [f"{whose}{name}peer {made.peer.text} in the run {first.run_id} ({first.run})"]
    for each in made.attestations:
        entry = each.entry
        since = f"counted since epoch {each.since:,}, " if each.since else ""
        lines.append(
            f"  the monitor {each.monitor.short} says, on {day(each.time)[:10]}: {since}{entry.samples:,.0f} of "
            f"{each.until.samples:,} samples and {format_duration(3600 * entry.hours)} (claimed, accepted by rounds); "
            f"{plural(entry.rounds, 'round')}, {format_size(entry.reduced_bytes)} added up, "
            f"there for {format_duration(entry.uptime)} (seen)"
        )
    lines.append(
        "All signatures are good, the peer's own too: the maker of this file has its key."
        if made.signature
        else "The monitors' signatures are good; the peer itself has not signed it."
    )
    lines.append("The numbers are the word of these monitors: a signature does not prove that they are true.")
    return lines


def only_home() -> Path:
    """Returns the only home on this computer of a peer that gives something or, of several, the only one whose peer
    runs."""
    from swarmcli.peer.home import LINK

    homes = homes_of(None, LINK)
    return only([home for home in homes if not home.name.startswith("monitor")] or homes, "--home")


def _attestation(home: Path, identity: Identity | None, peers: Sequence[str]) -> Attestation | None:
    """Returns the word of a monitor that runs now, or else the one that the home has kept."""
    from swarmcli.peer.home import read_link
    from swarmcli.peer.linked import LinkedRun
    from swarmcli.run.asking import ask_for_attestation, visit
    from swarmcli.run.certificate import FILE, ContributionCertificate

    kept = ContributionCertificate.read(home / FILE) if (home / FILE).is_file() else None
    about = kept.peer if kept is not None else identity.peer_id if identity is not None else None
    if about is None:
        raise UsageError(f"{home} is no directory of a peer that took part in a run; name another one with --home")
    try:
        link, _ = read_link(home)
        contacts, visitor = [*peers, *contacts_of(home)], LinkedRun(link).visitor()
        if not contacts:
            raise UsageError("no peer of it is known; name one with --peer")
        found = visit(contacts, lambda node: ask_for_attestation(node, link.run_id, about), visitor)
    except (OSError, SwarmError) as error:
        found = None
        err.print(f"the run could not be asked ({printable(str(error).splitlines()[0], 200)})")
    if found is not None or kept is None or kept.fault:
        return found
    said = max(kept.attestations, key=lambda each: each.entry.samples)
    when = day(said.time)
    err.print(f"no monitor answers; this was signed on {when}, when the peer last left")
    return said


def _identity(home: Path) -> Identity | None:
    """Reads the key of the peer, which may be running, so the home is not claimed. None: the key is not here."""
    from swarmcli.network.identity import Identity
    from swarmcli.network.key_file import read_key_file

    try:
        return Identity(read_key_file(home / "identity.key", "identity", "restore your copy of it"))
    except (OSError, SwarmError) as error:
        err.print(f"the peer's own key is not used: {printable(str(error), 200)}")
        return None
