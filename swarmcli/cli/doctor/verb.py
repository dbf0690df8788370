"""The command `swarm doctor`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from swarmcli.cli.console import err, out
from swarmcli.cli.doctor import computer, homes, machine, run
from swarmcli.cli.doctor.finding import Check, Context, Finding, bounded
from swarmcli.cli.ending import ExitCode
from swarmcli.errors import SwarmError, UsageError
from swarmcli.words import printable

STYLES = {"OK": "green", "WARN": "yellow", "FAIL": "bold red", "SKIP": "dim"}
# In this order: what a check finds out, later ones use.
CHECKS = (
    Check("Python", computer.check_python),
    Check("leftovers", machine.check_leftovers),
    Check("recipe", run.check_recipe),
    Check("configuration", computer.check_configuration),
    Check("limits", computer.check_limits),
    Check("clock", computer.check_clock),
    Check("disk", computer.check_disk),
    Check("torch", computer.check_torch, 120.0, "trying whether this computer computes well"),
    Check("names", run.check_names),
    Check("contacts", run.check_contacts, 180.0, "asking the first contacts of the run"),
    Check("recipe", run.check_offer, 60.0, "asking for the recipe of the run"),
    Check("memory", run.check_memory, 180.0, "finding out how large the model is"),
    Check("data", run.check_data, 300.0, "reading the first of the data"),
    Check("reach", run.check_network, 120.0, "finding out who can dial this computer, and how fast"),
    Check("homes", homes.find_homes),
    Check("identity", homes.check_identities),
    Check("journal", homes.check_journals, 300.0),
    Check("checkpoint", homes.check_checkpoints, 300.0),
    Check("peers", machine.check_peers, 60.0),
    Check("service", machine.check_services, 60.0),
)


def doctor(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[LINK|RECIPE]",
            help="A run to look at as well, by its link or recipe. Without it: this computer and your peers on it.",
        ),
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option("--peer", metavar="ADDRESS", help="A first contact to try. May be repeated.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe, as in swarm join."),
    ] = None,
    network: Annotated[
        bool, typer.Option("--network", help="Also find out who can dial this computer, and how fast: up to a minute.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Write what was found into a file for whoever helps you, without secrets.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="That file; JSON if it is called so. Implies --report."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per finding.")] = False,
) -> None:
    """Look at all that a peer needs, and say for each thing that is wrong what helps.

    It joins nothing, uses up no invitation, and changes nothing. The exit code is 1 if anything has failed.

    Examples:

    swarm doctor

    swarm doctor "swarm://…"

    swarm doctor my-run.yaml --network

    swarm doctor --report
    """
    context = Context(target or "", overrides or (), peer or (), network)
    if context.peers and not context.target:
        raise UsageError("--peer needs the run whose contact it is: swarm doctor LINK|RECIPE --peer ADDRESS")
    found = list(_examine(context, as_json))
    if not as_json:
        out.print(_summary(found), soft_wrap=True)
    if report or output is not None:
        _write(context, found, output)
    if any(each.outcome == "FAIL" for each in found):
        raise typer.Exit(ExitCode.FAILURE)


def _examine(context: Context, as_json: bool) -> Iterator[Finding]:
    """All that the checks find, shown as soon as it is known. On a terminal a last line says what one waits for."""
    status = out.status("")
    told = out.is_terminal and not (as_json or err.quiet)
    with status if told else nullcontext():
        for check in CHECKS:
            status.update(f"{check.doing or f'looking at: {check.name}'} …")
            for finding in bounded(check, context):
                _show(finding, as_json)
                yield finding


def _show(finding: Finding, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(finding)))
        return
    for line in lines(finding):
        out.print(line, soft_wrap=not out.is_terminal)


def lines(finding: Finding) -> Iterator[Text]:
    """One for what was found, and one for what helps."""
    first = Text.assemble(
        (f"{finding.outcome:<4}", STYLES[finding.outcome]),
        "  ",
        f"{printable(finding.check, 30)}: ",
        printable(finding.text, 1000),
    )
    first.overflow = "fold"
    yield first
    if finding.fix and finding.outcome != "OK":
        yield Text.assemble("      ", ("→ ", "bold"), printable(finding.fix, 1000), overflow="fold")


def _summary(found: Iterable[Finding]) -> Text:
    counts = {outcome: sum(each.outcome == outcome for each in found) for outcome in STYLES}
    if counts["FAIL"]:
        return Text(f"\n{counts['FAIL']} of {sum(counts.values())} failed; begin with the first", style="bold")
    warned = f", {counts['WARN']} to look at" if counts["WARN"] else ""
    return Text(f"\nnothing is broken{warned}", style="bold")


def _write(context: Context, found: list[Finding], file: Path | None) -> None:
    from swarmcli.cli.doctor.report import as_text, collect

    file = file or Path(time.strftime("swarm-report-%Y%m%d-%H%M%S.txt"))
    collected = collect(context, found)
    text = json.dumps(collected, indent=1) + "\n" if file.suffix == ".json" else as_text(collected)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SwarmError(f"{file} cannot be written ({error.strerror}); name another by --output") from error
    err.print(f"the report is in {file}; read it before you give it to anybody", soft_wrap=True)
