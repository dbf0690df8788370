"""Chooses which events are kept and shown: facts that have a table of their own, and lines for people."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from swarmcli import events as happened
from swarmcli.journal.options import JOURNAL
from swarmcli.network.token_bucket import TokenBucket
from swarmcli.recent import Recent
from swarmcli.words import format_duration, format_size, printable, some

_FLOODABLE = (
    happened.PeerConnected,
    happened.WayChanged,
    happened.PeerDisconnected,
    happened.PeerRefused,
    happened.PeerBanned,
    happened.PeerSilent,
)


_SHORT_ID = re.compile(r"\b[a-z2-7]{10}\b")
_LOSS = re.compile(r"(\d+) (samples of this peer are .*)")
_SUMMED = 10.0  # seconds for which losses are summed: a peer that catches up drops batch after batch


@dataclass(frozen=True, slots=True)
class Line(happened.Event):
    """An event as people read it. `kind` is one word for programs, `peer` the id of the peer that it is about, or
    empty."""

    level: Literal["detail", "info", "warning", "error"]
    kind: str
    peer: str
    text: str


class Recorder:
    """Says what is kept of an event, with its time. Remembers which peers are present, so that joining and leaving are
    recorded once; the peers' names; and samples that were lost lately, which are told in one sum."""

    def __init__(self) -> None:
        self._names = Recent[str, str](JOURNAL.names)  # by short id
        self._lost: dict[str, tuple[int, float]] = {}  # what became of lost samples → how many, and since when
        self._first_seen: dict[str, float] = {}
        self._reports = TokenBucket(JOURNAL.reports_per_second, JOURNAL.report_burst)
        self._lines = TokenBucket(JOURNAL.lines_per_second, JOURNAL.burst)
        self._suppressed = 0

    def kept(self, event: happened.Event, now: float) -> Iterator[happened.Event]:
        """Yields the event itself, if it has a table of its own, and its line. `now` is wall-clock seconds."""
        line = describe(event)
        yield from self.losses(now)
        match event:
            case happened.Noticed("warning", text) if loss := _LOSS.fullmatch(text):
                samples, since = self._lost.get(loss[2], (0, now))
                self._lost[loss[2]] = samples + int(loss[1]), since
                return
            case happened.EpochReported() if not self._reports.take_now(1, now):
                return
            case happened.RunObserved() | happened.EpochLoss():
                yield replace(event, time=now)
                return
            case happened.EpochAdvanced() | happened.RoundFinished() | happened.EpochReported():
                yield replace(event, time=now)
            case happened.Evaluated() | happened.Contribution() | happened.ContributionsCounted():
                yield replace(event, time=now)
            case happened.PeerSeen(peer) if peer not in self._first_seen and not self._reports.take_now(1, now):
                return
            case happened.PeerSeen(peer, gone=gone):
                known = peer in self._first_seen
                self._names[short(peer)] = printable(event.name, 64) or short(peer)
                yield replace(event, time=now, first_seen=self._first_seen.setdefault(peer, now))
                if gone:
                    del self._first_seen[peer]
                if bool(gone) == known:
                    line = describe_sighting(event)
        if line is not None and self._allowed(event, now):
            if self._suppressed:
                text = f"{self._suppressed} lines about connections left out"
                yield Line("detail", "suppressed", "", text, time=now)
                self._suppressed = 0
            alone = line.level in ("info", "detail")
            text = with_names(printable(line.text, JOURNAL.max_text), self._names, alone=alone)
            yield replace(line, text=text, time=now)

    def losses(self, now: float = math.inf) -> Iterator[Line]:
        """Yields the sums that have waited long enough; without `now` all of them, since nothing follows."""
        for fate, (samples, since) in list(self._lost.items()):
            if not since <= now < since + _SUMMED:
                del self._lost[fate]
                yield Line("warning", "notice", "", f"{samples} {fate}", time=since)

    def _allowed(self, event: happened.Event, now: float) -> bool:
        """Bounds the lines whose number strangers decide."""
        if not isinstance(event, _FLOODABLE) or self._lines.take_now(1, now):
            return True
        self._suppressed += 1
        return False


def with_names(text: str, names: Mapping[str, str], *, alone: bool = False) -> str:
    """Returns the text with `names` (by short ids) in place of short ids. Anybody may take any name, so the id stays
    beside it, unless it may stand `alone` and nobody else has it."""

    def called(found: re.Match[str]) -> str:
        name = names.get(found[0], found[0])
        plain = name == found[0] or (alone and list(names.values()).count(name) == 1)
        return name if plain else f"{name} ({found[0]})"

    return _SHORT_ID.sub(called, text) if names else text


def short(peer: str) -> str:
    """Returns the beginning of a peer id that people are shown."""
    return peer[:10]


def describe(event: happened.Event) -> Line | None:
    """Returns a line for an event; None for events that have a table of their own and went well, and for repeated
    sightings."""
    match event:
        case happened.PeerConnected(peer, address):
            return Line("detail", "connected", peer, f"connected to {short(peer)} at {address}")
        case happened.WayChanged(peer, address, relayed):
            way = "over a relay" if relayed else "direct"
            return Line("detail", "way", peer, f"the connection to {short(peer)} is {way} now, at {address}")
        case happened.PeerDisconnected(peer, reason):
            return Line("detail", "disconnected", peer, f"connection to {short(peer)} ended: {reason}")
        case happened.ReachabilityChanged(sentence=sentence):
            return Line("info", "reach", "", sentence)
        case happened.PeerSilent(peer, _, _, answers):
            does = "answers again" if answers else "does not answer"
            return Line("info" if answers else "warning", "silent", peer, f"{_who(event)} {does}")
        # the removed peer's own log tells its owner what to do
        case happened.PeerRefused(peer, reason, "membership"):
            return Line("info", "out", peer, f"{short(peer)} is no member any more: {reason.partition(';')[0]}")
        case happened.PeerRefused(peer, reason, what):
            return Line("warning", "refused", peer, f"refused {what} of {short(peer)}: {reason}")
        case happened.PeerBanned(peer, reason):
            return Line("warning", "banned", peer, f"{short(peer)} is banned from this run: {reason}")
        case happened.MembershipEnded(reason):
            return Line("error", "no member", "", reason)
        case happened.WokeUp(seconds):
            return Line(
                "info",
                "woke up",
                "",
                f"this machine slept for {format_duration(seconds)}; all connections are made anew",
            )
        case happened.RoundFinished():
            return _describe_round(event)
        case happened.Evaluated(epoch, _, samples):
            by = f", {event.by}" if event.by else ""
            text = f"evaluated epoch {epoch}{by}: {event.sentence} on {samples:,} samples that nobody trains on"
            return Line("info", "evaluation", "", text)
        case happened.StateDownloaded():
            return _describe_download(event)
        case happened.StateDonated(peer, epoch, size):
            return Line(
                "info", "donated", peer, f"gave the state of epoch {epoch} to {short(peer)} ({format_size(size)})"
            )
        case happened.RoundsReplayed(epoch, _, rounds, reason):
            what = "a round that it had missed" if rounds == 1 else f"{rounds} rounds that it had missed"
            return Line("info", "replayed", "", f"caught up to epoch {epoch} by {what}, because {reason}")
        case happened.DriftMeasured():
            return _describe_drift(event)
        case happened.CheckpointWritten(epoch, path, size):
            return Line("info", "checkpoint", "", f"checkpoint of epoch {epoch} at {path} ({format_size(size)})")
        case happened.ActivityStatus():
            return Line("info", "activity", "", "works again" if event.state == "running" else event.sentence)
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
    who = some([f"{short(peer)} ({reason})" for peer, reason in event.left_out.items()])
    return Line("info", "left out", "", f"round{where} went on without {who}")


def _describe_download(event: happened.StateDownloaded) -> Line:
    donors = ", ".join(map(short, event.donors)) or "nobody"
    amount = f"{format_size(event.bytes)} in {format_duration(event.seconds)}"
    why = f", because {event.reason}" if event.reason else ""
    return Line("info", "downloaded", "", f"downloaded the state of epoch {event.epoch} from {donors} ({amount}){why}")


def _describe_drift(event: happened.DriftMeasured) -> Line | None:
    """Peers that agree within the tolerance are not told of."""
    if not event.strays:
        return None
    who = some([short(peer) for peer in event.strays])
    far = f"{max(event.distances.values(), default=event.distance):.1e}"
    text = f"the parameters of {who} have drifted away ({far}): downloading the state repairs them"
    return Line("warning", "drift", event.strays[0], text)


def describe_sighting(event: happened.PeerSeen) -> Line:
    """Describes the first and the last time that a peer is seen; those between are not told of."""
    if event.gone == "lost":
        return Line("warning", "lost", event.peer, f"{_who(event)} is lost: it said no goodbye")
    if event.gone:
        return Line("info", "left", event.peer, f"{_who(event)} left")
    return Line("info", "joined", event.peer, f"{_who(event)} joined")


def _who(event: happened.PeerSeen | happened.PeerSilent) -> str:
    name = event.name or short(event.peer)
    return name if name == event.role else f"{event.role} {name}"
