"""Events as lines for people: what the journal keeps, the live view prints and the dashboard lists."""

from __future__ import annotations

from typing import NamedTuple

from swarmcli import events as happened
from swarmcli.journal.records import Level

SHORT_ID = 10  # characters of a peer id that people are shown


class Line(NamedTuple):
    """`kind` is one word for programs, `peer` the id of whom it is about or empty."""

    level: Level
    kind: str
    peer: str
    text: str


def short(peer: str) -> str:
    return peer[:SHORT_ID]


def describe(event: happened.Event) -> Line | None:
    """A line for an event; None for those that have a table of their own and went well, and for repeated sightings."""
    match event:
        case happened.PeerConnected(peer, address):
            return Line("detail", "connected", peer, f"connected to {short(peer)} at {address}")
        case happened.PeerDisconnected(peer, reason):
            return Line("detail", "disconnected", peer, f"connection to {short(peer)} ended: {reason}")
        case happened.PeerSilent(peer, _, _, answers):
            does = "answers again" if answers else "does not answer"
            return Line("info" if answers else "warning", "silent", peer, f"{_who(event)} {does}")
        case happened.PeerRefused(peer, reason, what):
            return Line("warning", "refused", peer, f"refused {what} of {short(peer)}: {reason}")
        case happened.RoundFinished():
            return _describe_round(event)
        case happened.StateDownloaded():
            return _describe_download(event)
        case happened.StateDonated(peer, epoch, size):
            return Line(
                "info", "donated", peer, f"gave the state of epoch {epoch} to {short(peer)} ({megabytes(size)})"
            )
        case happened.RoundsReplayed(epoch, _, rounds, reason):
            what = "a round that it had missed" if rounds == 1 else f"{rounds} rounds that it had missed"
            return Line("info", "replayed", "", f"stepped with {what}, to epoch {epoch}, because {reason}")
        case happened.DriftMeasured():
            return _describe_drift(event)
        case happened.CheckpointWritten(epoch, path, size):
            return Line("info", "checkpoint", "", f"checkpoint of epoch {epoch} at {path} ({megabytes(size)})")
        case happened.Noticed(level, text):
            return Line(level, "notice", "", text)
        case _:
            return None


def _describe_round(event: happened.RoundFinished) -> Line | None:
    where = f" at epoch {event.epoch}" if event.epoch >= 0 else ""
    if event.outcome != "committed":
        return Line(
            "warning", "round", event.leader, f"round{where} {event.outcome}: {event.reason or 'no reason given'}"
        )
    if not event.left_out:
        return None
    who = ", ".join(f"{short(peer)} ({reason})" for peer, reason in list(event.left_out.items())[:4])
    more = f" and {len(event.left_out) - 4} more" if len(event.left_out) > 4 else ""
    return Line("info", "left out", "", f"round{where} went on without {who}{more}")


def _describe_download(event: happened.StateDownloaded) -> Line:
    donors = ", ".join(map(short, event.donors)) or "nobody"
    amount = f"{megabytes(event.bytes)} in {event.seconds:.1f} s"
    why = f", because {event.reason}" if event.reason else ""
    return Line("info", "downloaded", "", f"downloaded the state of epoch {event.epoch} from {donors} ({amount}){why}")


def _describe_drift(event: happened.DriftMeasured) -> Line | None:
    """Peers that agree within the tolerance are no news."""
    far = f"{max(event.distances.values(), default=event.distance):.1e}"
    if event.strays:
        who = ", ".join(map(short, event.strays[:4]))
        more = f" and {len(event.strays) - 4} more" if len(event.strays) > 4 else ""
        text = f"the parameters of {who}{more} have drifted away ({far}): downloading the state repairs them"
        return Line("warning", "drift", event.strays[0], text)
    if event.averages:
        return Line("info", "drift", "", f"parameters differ by up to {far} at epoch {event.epoch}: averaging them")
    return None


def describe_sighting(event: happened.PeerSeen) -> Line:
    """For the first and the last time that a peer is seen; those between are no news."""
    if event.gone == "lost":
        return Line("warning", "lost", event.peer, f"{_who(event)} is lost: it said no goodbye")
    if event.gone:
        return Line("info", "left", event.peer, f"{_who(event)} left")
    return Line("info", "joined", event.peer, f"{_who(event)} joined")


def _who(event: happened.PeerSeen | happened.PeerSilent) -> str:
    name = event.name or short(event.peer)
    return name if name == event.role else f"{event.role} {name}"


def megabytes(size: float) -> str:
    """Bytes as people read them, in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
