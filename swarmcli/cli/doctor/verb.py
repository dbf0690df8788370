"""The command `swarm doctor`."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from swarmcli.cli.console import err, out
from swarmcli.cli.doctor import computer, homes, network, run
from swarmcli.cli.doctor.finding import Check, Context, Finding, findings
from swarmcli.cli.ending import ExitCode
from swarmcli.cli.local import Json
from swarmcli.cli.peers import Overrides, Peers
from swarmcli.network.addresses import parse_address
from swarmcli.words import plural, printable

STYLES = {"OK": "green", "WARN": "yellow", "FAIL": "bold red", "SKIP": "dim"}
# In this order: what a check finds out, later ones use.
CHECKS = (
    Check("Python", computer.check_python),
    Check("recipe", run.check_recipe),
    Check("disk", computer.check_disk),
    Check("device", computer.check_torch, 120.0, "trying whether this computer computes well"),
    Check("contacts", run.check_contacts, 180.0, "asking the first contacts of the run"),
    Check("recipe", run.check_offer, 60.0, "asking for the recipe of the run"),
    Check("reach", network.check_network, 120.0, "finding out who can dial this computer, and how fast"),
    Check("homes", homes.check_homes),
)


def doctor(
    peer: Peers,
    overrides: Overrides,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[LINK|RECIPE]",
            help="A run to look at as well, by its link or recipe. Without it: this computer alone.",
        ),
    ] = None,
    on_network: Annotated[
        bool, typer.Option("--network", help="Also find out who can dial this computer, and how fast: up to a minute.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check all that a peer needs, and say of each fault what helps.

    It joins nothing, uses up no invitation, and changes nothing. The exit code is 1 if anything has failed.

    Examples:

    swarm doctor

    swarm doctor "swarm://…"

    swarm doctor my-run.yaml --network
    """
    context = Context(target or "", overrides, peer, on_network)
    for address in context.peers:
        parse_address(address)
    found: list[Finding] = []
    status = out.status("")
    # On a terminal a last line says what one waits for.
    with status if out.is_terminal and not (as_json or err.quiet) else nullcontext():
        for check in CHECKS:
            status.update(f"{check.doing or f'looking at: {check.name}'} …")
            for finding in findings(check, context):
                found.append(finding)
                if as_json:
                    typer.echo(json.dumps(asdict(finding)))
                else:
                    _show(finding)
    failed, warned = (sum(each.outcome == outcome for each in found) for outcome in ("FAIL", "WARN"))
    if not as_json:
        well = "nothing is broken" + (f", {plural(warned, 'warning')}" if warned else "")
        said = f"{failed} of {len(found)} checks failed; begin with the first" if failed else well
        out.print(Text(f"\n{said}", style="bold"))
    if failed:
        raise typer.Exit(ExitCode.FAILURE)


def _show(finding: Finding) -> None:
    """A line for what was found, and one for what helps."""
    what = f"  {printable(finding.check, 30)}: {printable(finding.text, 1000)}"
    lines = [Text.assemble((f"{finding.outcome:<4}", STYLES[finding.outcome]), what, overflow="fold")]
    if finding.fix and finding.outcome != "OK":
        lines.append(Text.assemble("      ", ("→ ", "bold"), printable(finding.fix, 1000), overflow="fold"))
    for line in lines:
        out.print(line)
