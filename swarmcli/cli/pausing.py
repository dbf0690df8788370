"""`swarm pause`, `resume` and `stop`: what a user asks of peers that run on this computer."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from swarmcli.cli.local import AskedPeers, described, spread
from swarmcli.errors import ControlError, UsageError
from swarmcli.machine import client
from swarmcli.machine.moments import duration, moment
from swarmcli.machine.registry import LocalPeer, LocalPeers
from swarmcli.words import printable

# How long `stop` waits for a peer, in seconds.
SAVE_SECONDS = 120.0  # for a peer that has nothing left to hand in: for its step, and perhaps a checkpoint
HAND_IN_SECONDS = 600.0  # before that: no peer stays longer to hand in
ANSWER_SECONDS = 3.0  # after that, a peer that should end at once and does not answer is killed
LOOK_SECONDS = 0.25  # between two looks at who still runs


@dataclass(frozen=True, kw_only=True)
class PauseOptions(AskedPeers):
    lasting: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="Go on by itself after 2h, 45 min, 1h30m.")
    ] = None
    until: Annotated[
        str | None, typer.Option("--until", metavar="MOMENT", help="Go on by itself at 18:00, tomorrow 8:00, mon 8:00.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class StopOptions(AskedPeers):
    now: Annotated[bool, typer.Option("--now", help="At once: no goodbye, and nothing is saved.")] = False


@spread
def pause(options: PauseOptions) -> None:
    """Let your peers on this computer pause: they hand in what they have computed, and leave the processor alone.

    The others are told, so nobody waits. A pause ends with swarm resume, or at its time.

    \b
    swarm pause                   all of them, until swarm resume
    swarm pause --for 2h
    swarm pause --until 18:00
    swarm pause --peer trainer-2  one of them, by its name or directory
    """
    lasting, until = options.lasting, options.until
    if lasting is not None and until is not None:
        raise UsageError("--for and --until say the same in two ways; give one of them")
    end = {"seconds": duration(lasting)} if lasting else {"until": moment(until)} if until else {}
    _change("pause", end, options)


@spread
def resume(options: AskedPeers) -> None:
    """Let your peers on this computer go on after a pause.

    What your limits forbid at the moment (on battery, say) stays forbidden, and is named.

    \b
    swarm resume                   all of them
    swarm resume --run stdlib-lm   those of one run
    """
    _change("resume", {}, options)


def _change(path: str, body: dict[str, Any], options: AskedPeers) -> None:
    registry = LocalPeers()
    asks = {peer: partial(client.post, peer, path, body, registry=registry) for peer in options.peers_of(registry)}
    _tell([_asked(peer, ask) for peer, ask in asks.items()], options, goes_on=path == "resume")


@spread
def stop(options: StopOptions) -> None:
    """Let your peers on this computer leave, once they have handed in what they have computed.

    They wait for the round that takes it, ten minutes at most; then they save what nobody else holds and say goodbye.
    The command waits for that. If nobody else computes, the unfinished part (some seconds of work) is lost. Ctrl-C
    where one of them runs does the same for that one.

    \b
    swarm stop                    all of them
    swarm stop --peer trainer-2   one of them, by its name or directory
    swarm stop --now              without waiting for anything
    """
    registry, silently = LocalPeers(), options.quiet or options.as_json
    peers = options.peers_of(registry)
    results = [_asked(each, partial(_ask_to_stop, registry, each, options.now)) for each in peers]
    if not silently:
        _say_what_takes_time(results)
    with _shown(silently) as show:
        left = _wait_for_end(registry, dict(zip(peers, results, strict=True)), show)
    for each, result in zip(peers, results, strict=True):
        if each.home in left:
            result.setdefault("error", "it has not ended yet; it may be saving; `swarm stop --now` ends it")
        else:
            result.pop("error", None)  # it was leaving by itself, and had hung up already
        result["stopped"] = "error" not in result
    _tell(results, options)


def _ask_to_stop(registry: LocalPeers, peer: LocalPeer, now: bool) -> Any:
    """Asks a peer to stop; returns its answer. A peer that is still joining cannot be asked: it gets a signal."""
    try:
        if peer.port is not None:
            seconds = ANSWER_SECONDS if now else client.SECONDS
            return client.post(peer, "stop", {"now": now}, registry=registry, timeout=seconds)
    except ControlError:
        if not now:
            raise
    processes = [each for each in registry.living() if each.home == peer.home]
    if now:
        _signal(processes, getattr(signal, "SIGKILL", signal.SIGTERM))
    elif os.name == "nt":  # every signal from outside ends a process at once there
        raise ControlError("it is still joining and cannot be asked yet; try again in a moment, or use --now")
    else:
        _signal(processes, signal.SIGTERM)
    return None


def _signal(processes: list[LocalPeer], number: int) -> None:
    for each in processes:
        try:
            if each.lives:
                os.kill(each.pid, number)
        except ProcessLookupError:
            pass
        except OSError as error:
            raise ControlError(f"its process {each.pid} cannot be ended: {error.strerror}") from error


def _say_what_takes_time(results: list[dict[str, Any]]) -> None:
    for result in results:
        if "error" not in result and not sys.stderr.isatty():  # on a terminal, it is shown all the time
            typer.echo(f"{_who(result)}: {_stopping(result.get('activity'))}", err=True)
    if any(_hands_in(result.get("activity")) for result in results):
        typer.echo("`swarm stop --now` ends it without handing in; Ctrl-C here only stops waiting", err=True)


def _hands_in(activity: Any) -> bool:
    """Whether the peer, which may be of another version, answers that it hands in samples."""
    return isinstance(activity, dict) and bool(activity.get("keeps"))


def _stopping(activity: Any) -> str:
    return printable(str(activity["sentence"])) if _hands_in(activity) else "stopping"


def _wait_for_end(
    registry: LocalPeers, asked: Mapping[LocalPeer, Mapping[str, Any]], show: Callable[[str], object]
) -> set[str]:
    """Returns the homes of peers that still run after the time for handing in and saving; a peer that could not be
    asked gets less time. Shows what it waits for."""
    began = time.monotonic()
    until = {
        each.home: began + (ANSWER_SECONDS if "error" in result else SAVE_SECONDS) for each, result in asked.items()
    }
    while True:
        living, now = {each.home for each in registry.living()}, time.monotonic()
        left = [each for each in asked if each.home in living and now < until[each.home]]
        if not left:
            return until.keys() & living
        activities = [None if "error" in asked[each] else _activity(registry, each) for each in left]
        for each, activity in zip(left, activities, strict=True):
            if _hands_in(activity):
                until[each.home] = min(now, began + HAND_IN_SECONDS) + SAVE_SECONDS
        show("\n".join(f"{described(each)}: {_stopping(said)}" for each, said in zip(left, activities, strict=True)))
        time.sleep(LOOK_SECONDS)


def _activity(registry: LocalPeers, peer: LocalPeer) -> Any:
    """Asks the peer what it does now; None: it does not answer, or not any more."""
    with suppress(ControlError):
        if peer.port is not None:
            return client.get(peer, "control", registry=registry, timeout=ANSWER_SECONDS).get("activity")
    return None


@contextmanager
def _shown(silent: bool) -> Iterator[Callable[[str], object]]:
    """Yields a function that shows a text in place of the one before, on a terminal; elsewhere it shows nothing."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if silent or not console.is_terminal:
        yield lambda text: None
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda text: live.update(Text(text), refresh=True)


def _asked(peer: LocalPeer, ask: Callable[[], Any]) -> dict[str, Any]:
    """Returns how one request ended; the refusal of one peer does not keep the others from being asked."""
    result: dict[str, Any] = {"peer": peer.label, "role": peer.role, "run": peer.run_id, "home": peer.home}
    try:
        answer = ask()
    except ControlError as error:
        return result | {"error": str(error)}
    return result | ({"activity": answer} if isinstance(answer, dict) else {})


def _tell(results: list[dict[str, Any]], options: AskedPeers, *, goes_on: bool = False) -> None:
    """Prints the results. Ends the command with 1 if a peer did not do it. `goes_on`: peers were asked to go on, which
    a limit may forbid."""
    if options.as_json:
        typer.echo(json.dumps(results))
    for result in results:
        if "error" in result:
            typer.echo(f"swarm: {_who(result)}: {result['error']}", err=True)
        elif not options.quiet and not options.as_json:
            said = "has stopped" if "stopped" in result else result["activity"]["sentence"]
            if goes_on and result["activity"]["state"] in ("pausing", "paused"):
                said = f"still {said}; `swarm limits show` shows what holds it"
            typer.echo(f"{_who(result)}: {said}", err=True)
    if any("error" in result for result in results):
        raise typer.Exit(1)


def _who(result: dict[str, Any]) -> str:
    return f"{result['peer']} ({result['role']} of {result['run']})"
