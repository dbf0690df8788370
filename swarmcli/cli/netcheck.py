"""`swarm netcheck`: whether others can dial this computer, and what that means for taking part."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swarmcli.cli.console import err, out, plain_table, setup_logging
from swarmcli.cli.ending import ExitCode
from swarmcli.cli.linking import typed_link
from swarmcli.cli.peers import Host, NoPortMapping, Peers, Port, Verbose
from swarmcli.journal import printable
from swarmcli.peer.linked import visitor_of
from swarmcli.recipe import Link, Recipe, is_link, load_recipe
from swarmcli.run.asking import Visitor
from swarmcli.words import format_duration, format_rate

if TYPE_CHECKING:
    from swarmcli.peer.netcheck import FamilyReport, LinkReport, MappingReport, NetReport

Run = Annotated[
    str | None, typer.Argument(metavar="LINK|RECIPE", help="The run whose peers are asked; without it nobody is.")
]


def netcheck(
    peer: Peers,
    run: Run = None,
    host: Host = None,
    port: Port = None,
    no_port_mapping: NoPortMapping = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
    verbose: Verbose = False,
) -> None:
    """Find out whether others can dial this computer, what its router does, and how fast its link is.

    \b
    swarm netcheck
    swarm netcheck "swarm://…"
    """
    setup_logging(verbose)

    read = None if run is None else typed_link(run) if is_link(run) else load_recipe(Path(run))
    options = options_of(read, peer)
    if run is not None and not options["initial_peers"]:
        err.print(f"{run} names no first contact, so no peer is asked; name one with --peer", soft_wrap=True)
    chosen = {"host": host, "port": port, "port_mapping": False if no_port_mapping else None}
    options |= {key: value for key, value in chosen.items() if value is not None}
    waiting = err.status("looking around, for up to a minute") if err.is_terminal else nullcontext()
    with waiting:
        found = find(options)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        out.print(report(found))
    if found.peers and not any(each.down or each.up for each in found.peers):
        err.print("how fast this computer's link is could not be measured; try again in some minutes", soft_wrap=True)
        raise typer.Exit(ExitCode.FAILURE)


def options_of(run: Link | Recipe | None, peers: Sequence[str]) -> dict[str, Any]:
    """How a peer of this run would listen on this machine, and whom it would dial first. Raises MembershipError,
    IdentityError."""
    if not isinstance(run, Recipe):
        return {"initial_peers": [*peers, *(run.addresses if run else ())], "visitor": visitor_of(run)}
    local = run.local
    return {
        "initial_peers": list(peers) or list(run.network.initial_peers),
        "client_mode": local.client_mode,
        "host": local.host or "",
        "port": local.port,
        "announce_addresses": local.announce_addresses,
        "port_mapping": local.port_mapping,
        "visitor": visitor_of(run),
    }


def find(options: dict[str, Any]) -> NetReport:
    """Takes part in the network of the run for up to a minute, and asks its peers. `options`: see `options_of`."""
    from swarmcli.dht import DHT
    from swarmcli.peer.netcheck import ask_peers, look_around

    if not options["initial_peers"]:
        return asyncio.run(look_around(port=options.get("port", 0), port_mapping=options.get("port_mapping", True)))
    visitor: Visitor | None = options.pop("visitor", None)
    dht = DHT(start=False, identity=visitor.identity if visitor else None, **options)
    dht.membership = visitor.membership if visitor else None
    with dht:
        return dht.run_coroutine(ask_peers(dht))


SCOPES = {"host": "from this computer", "lan": "from this network", "internet": "from the internet"}
TRANSLATIONS = {
    "none": "not translated",
    "independent": "translated, to one port for all, so direct connections can be made from both ends",
    "dependent": "translated, to another port for each, so relays are needed",
    None: "translation not known",
}
HOW = {
    "assumed": "as far as is known",
    "dialed back": "contacts dialed it back",
    "dialed from outside": "others have dialed it",
    "mapped": "contacts dialed the port of its router",
    "stated": "as was stated",
    "asked in vain": "no contact's dial came in",
    "not checked": "no contact was asked",
}
UNKNOWN = "–"


def report(found: NetReport) -> RenderableType:
    """The sentence, what it rests on, and the peers that were asked."""
    facts = Table.grid(padding=(0, 3, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for family in found.families:
        facts.add_row(family.family, _family(family))
    for name, words in (
        ("listening", Text("\n".join(map(printable, found.listening)) or "nowhere")),
        ("router", _mapping(found.mapping)),
        ("clock", Text(_clock(found.clock_offset))),
    ):
        facts.add_row(name, words)
    sentence = printable(found.sentence, 600)
    top = Text(f"{sentence[:1].upper()}{sentence[1:]}.", style="bold")
    peers: list[RenderableType] = [Text(), _peers(found.peers)] if found.peers else []
    return Group(Text(), top, Text(), facts, *peers, Text())


def _family(found: FamilyReport) -> Text:
    if found.dialable is None:
        text = Text("not known")
    elif found.dialable:
        text = Text("can be dialed", style="green").append(f" {SCOPES.get(found.scope, '')}", style="default")
    else:
        text = Text("cannot be dialed", style="yellow").append(f" {SCOPES.get(found.scope, '')}", style="default")
    if found.how:
        text.append(f", {HOW.get(found.how, printable(found.how))}", style="dim")
    for address in found.addresses:
        text.append(f"\n{printable(address)}")
    if found.seen is not None or found.translation is not None:
        seen = "" if found.seen is None else f"seen as {printable(found.seen)}; "
        text.append(f"\n{seen}{TRANSLATIONS.get(found.translation, UNKNOWN)}", style="dim")
    return text


def _mapping(found: MappingReport) -> Text:
    gateway = printable(found.gateway) or "none found"
    if found.address:
        return Text(f"{gateway}, opened {printable(found.address)} over {found.method}")
    if not found.asked:
        return Text(f"{gateway}, not asked for a port")
    why = "".join(f"\n{printable(each)}" for each in found.problem.split("; ") if each)
    return Text(f"{gateway}, opens no port").append(why, style="dim")


def _clock(offset: float | None) -> str:
    if offset is None:
        return "nobody to compare with"
    if abs(offset) < 0.05:
        return "as the swarm's"
    return f"{format_duration(abs(offset))} {'behind' if offset > 0 else 'ahead of'} the swarm's"


def _peers(found: tuple[LinkReport, ...]) -> Table:
    table = plain_table()
    table.add_column("peer", no_wrap=True)
    table.add_column("address", overflow="fold")
    for name in ("round trip", "down", "up"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for peer in found:
        table.add_row(
            printable(peer.peer, 10),
            "over a relay" if peer.relayed else printable(peer.address) or UNKNOWN,
            UNKNOWN if peer.round_trip is None else format_duration(peer.round_trip),
            UNKNOWN if peer.down is None else format_rate(peer.down),
            UNKNOWN if peer.up is None else format_rate(peer.up),
            Text("; ".join(filter(None, ["relay" if peer.relays else "", printable(peer.problem, 80)])), style="dim"),
        )
    return table
