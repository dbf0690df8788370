"""Checks of the other peers of this user on this computer, and of those that the system starts by itself."""

from __future__ import annotations

from collections.abc import Iterator

from swarmcli.cli.doctor.finding import Context, Finding, of_error
from swarmcli.errors import SwarmError
from swarmcli.machine.registry import OURS, VARIABLE, is_running

STALE_FIX = "nothing has to be done; `swarm log` in its directory shows what was before its end"


def check_leftovers(context: Context) -> Iterator[Finding]:
    """Entries of peers that were killed. To be looked at first: whoever asks for the living ones removes the others."""
    if stale := _stale(context):
        text = f"{stale} was killed, or power was lost: it left an entry, which is removed now"
        yield Finding("leftovers", "WARN", text, STALE_FIX)


def check_peers(context: Context) -> Iterator[Finding]:
    """Those that run answer, and raise no alarm."""
    from swarmcli.cli.status import reports

    registry = context.registry
    if registry.directory.exists() and not registry.is_own:
        yield Finding(
            "peers",
            "FAIL",
            f"{registry.directory} belongs to another user or may be written by others, so no peer is found there",
            f"chmod 700 {registry.directory}, or set {VARIABLE} to a directory of your own",
        )
        return
    peers = registry.peers()
    if not peers:
        yield Finding("peers", "SKIP", "no peer of yours runs on this computer")
        return
    for report in reports(registry, peers):
        who = f"{report['name']} ({report['role']} of {report['run_id']})"
        if "error" in report:
            yield Finding("peers", "FAIL", f"{who} does not answer", f"`swarm stop --now` ends process {report['pid']}")
        elif "joining" in report:
            yield Finding("peers", "OK", f"{who} is joining")
        else:
            yield from _of_state(who, report["state"])


def _stale(context: Context) -> str:
    """Those in the registry that do not run any more, in words; asking for the living ones removes them."""
    directory = context.registry.directory
    names = [OURS.fullmatch(file.name) for file in directory.glob("*.json")] if directory.is_dir() else []
    gone = sorted({named[1] for named in names if named and not is_running(int(named[1]), float(named[2]))})
    return f"process {', '.join(gone[:8])}" if gone else ""


def _of_state(who: str, state: object) -> Iterator[Finding]:
    try:
        run, sentence = state["run"], state["me"]["sentence"]  # type: ignore[index]
        alarms = [text for text in (run["alarm"], run["notice"], *(a["text"] for a in state["alerts"])) if text]  # type: ignore[index]
    except (KeyError, TypeError):
        yield Finding("peers", "WARN", f"{who} is of another version of swarm", "stop it and start it again")
        return
    if not alarms:
        yield Finding("peers", "OK", f"{who}: {sentence}")
    for alarm in alarms:
        yield Finding("peers", "WARN", f"{who}: {alarm}", "`swarm status` and its page tell more")


def check_services(context: Context) -> Iterator[Finding]:
    """Peers that start by themselves run, and outlive a session."""
    from swarmcli.cli import service

    system = service.manager()
    names = service.installed(system)
    if not names:
        yield Finding("service", "SKIP", "none is installed; `swarm service install LINK` makes one")
    for name in names:
        try:
            running, state = system.look(name)
        except SwarmError as error:
            yield of_error("service", error)
            continue
        if not running:
            yield Finding("service", "FAIL", f"{name} does not run ({state})", f"what it said: {system.log_of(name)}")
        elif hint := system.hint():
            what, _, fix = hint.partition("; ")
            yield Finding("service", "WARN", f"{name} runs; {what}", fix or "stay logged in while it should help")
        else:
            yield Finding("service", "OK", f"{name} runs")
