"""`swarm status`: what this user's peers on this computer do; it asks all of them at the same time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import typer

from swarmcli.cli.local import HOW_TO_JOIN, NOBODY, AskedPeers, spread
from swarmcli.errors import ControlError
from swarmcli.machine import client
from swarmcli.machine.registry import LocalPeer, LocalPeers
from swarmcli.words import format_moment, plural, printable, roughly


@spread
def status(options: AskedPeers) -> None:
    """Show what your peers on this computer do, and how their runs go.

    \b
    swarm status            all of them
    swarm status --json     for programs: a list, one object for each peer
    """
    registry = LocalPeers()
    found = reports(registry, options.peers_of(registry)) if registry.peers() else []
    typer.echo(json.dumps(found) if options.as_json else text(found))
    if not found and not options.as_json and not options.quiet:
        typer.echo(HOW_TO_JOIN, err=True)


def reports(registry: LocalPeers, peers: list[LocalPeer]) -> list[dict[str, Any]]:
    """Returns one report for each, in their order: what the registry says, and below `state` what the peer answers
    (`GET state`), or below `error` why it does not."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(16, len(peers))) as pool:
        return list(pool.map(lambda peer: _report(registry, peer), peers))


def _report(registry: LocalPeers, peer: LocalPeer) -> dict[str, Any]:
    known = {
        "name": peer.label,
        "role": peer.role,
        "run_id": peer.run_id,
        "home": peer.home,
        "pid": peer.pid,
        "started": peer.started,
    }
    if peer.port is None:
        return known | {"joining": True}
    try:
        # A peer that is stopped or overloaded delays the answer by no more than this.
        state = client.get(peer, "state", registry=registry, timeout=3.0)
        return known | {"state": state, "page": f"{peer.api}/?token={registry.token(peer)}"}
    except ControlError as error:
        return known | {"error": str(error)}


def text(found: list[dict[str, Any]]) -> str:
    """Returns a few lines for people about each peer."""
    if not found:
        return NOBODY
    return "\n\n".join("\n".join(printable(line, 1100) for line in _lines(each)) for each in found)


def _lines(report: dict[str, Any]) -> Iterator[str]:
    yield f"{report['name']}, {report['role']} of {report['run_id']}, since {format_moment(report['started'])}"
    if "error" in report:
        yield f"  {report['error']}"
    elif "joining" in report:
        yield "  Joining the run"
    else:
        try:
            yield from _told(report["state"])
        except (KeyError, TypeError, ValueError):  # of a version whose answers differ
            yield "  This version of swarm cannot show its answer; --json shows it"
        yield f"  page   {report['page']}"
    yield f"  files  {report['home']}"


def _told(state: dict[str, Any]) -> Iterator[str]:
    run, me, counts = state["run"], state["me"], state["counts"]
    yield f"  {me['sentence']}"
    yield f"  run    {', '.join(filter(None, _run(run, counts)))}"
    if me["samples"] or me["share"] is not None:
        yield f"  mine   {', '.join(filter(None, _mine(me)))}"
    for label, name in (("model", "evaluated"), ("bytes", "moved"), ("slow ", "seat"), ("waits", "waits")):
        if run.get(name):
            yield f"  {label}  {run[name]}"
    for text in (run["alarm"], run["notice"], *(alert["text"] for alert in state["alerts"])):
        if text:
            yield f"  alarm  {text}"


def _run(run: dict[str, Any], counts: dict[str, Any]) -> Iterator[str]:
    yield f"epoch {run['epoch']:,}" + (f" of {run['max_epochs']:,}" if run["max_epochs"] else "")
    going_on = run["target"] and run["state"] not in ("finished", "synchronizing")
    yield f"{min(1.0, run['samples'] / run['target']):.0%} of this epoch done" if going_on else ""
    yield f"{plural(counts['trainers'], 'trainer')}"
    yield f"{counts['following']} of them computing nothing" if counts.get("following") else ""
    yield f"{run['samples_per_second']:,.0f} samples a second" if run["samples_per_second"] else ""
    yield f"about {roughly(run['run_eta_seconds'])} to the end" if run["run_eta_seconds"] else ""


def _mine(me: dict[str, Any]) -> Iterator[str]:
    yield f"{me['samples']:,} samples"
    yield f"{me['share']:.0%} of the last epochs" if me["share"] is not None else ""
    yield f"place {me['rank']} of {me['ranked']} {me['told_by']}".rstrip() if me["rank"] and me["ranked"] > 1 else ""
