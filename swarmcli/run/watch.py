"""How a run is doing at this moment: one object that the terminal and the dashboard ask."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from swarmcli.averaging.round.pace import longest_sending
from swarmcli.events import EpochLoss, Evaluated, Event, Noticed
from swarmcli.network.context import Traffic
from swarmcli.network.identity import PeerID
from swarmcli.optim.peers.progress import seconds_until
from swarmcli.optim.peers.report import PeerReport, is_settled
from swarmcli.recipe import HuggingFaceDataset
from swarmcli.recipe.link import reach_in_words
from swarmcli.recipe.offered import joining, needs_in_words
from swarmcli.run.history import EpochHistory
from swarmcli.run.standstill import Standstill, deserted, stands
from swarmcli.run.values import Health, PeerStatus, RunStatus, State
from swarmcli.words import format_size, listed, roughly

if TYPE_CHECKING:
    from swarmcli.dht import DHT
    from swarmcli.events import Events
    from swarmcli.journal import Journal
    from swarmcli.network.transports.base import Connection
    from swarmcli.optim import Optimizer, PeerDescription
    from swarmcli.optim.config import Role
    from swarmcli.recipe import Link, Recipe
    from swarmcli.run.evaluations import RunEvaluations
    from swarmcli.run.values import Way


GOES_ON = ("training", "averaging", "following")  # states in which it can be told when the epoch ends

# A row shows a peer's report in the fields that both have; but its samples are those of the present epoch.
AS_REPORTED = tuple((PeerReport.model_fields.keys() & {each.name for each in fields(PeerStatus)}) - {"samples"})
Expected = Mapping[PeerID, tuple[float, float]]  # what each peer should have by now: samples, and samples a second


def moved_in_words(moved: Mapping[str, Traffic]) -> str:
    """Says to people how many bytes a peer sent and received, and for what."""
    parts = {"averaging": moved.get("allreduce", Traffic()), "copies of the model": moved.get("state", Traffic())}
    whole = sum(moved.values(), Traffic())
    parts = {"in all": whole} | parts | {"all else": whole - sum(parts.values(), Traffic())}
    told = [f"{what}: {format_size(t.sent)} sent, {format_size(t.received)} received" for what, t in parts.items()]
    return "; ".join(told) if moved else ""


class WatchedPeer(Protocol):
    """The part of a peer that its watch reads."""

    recipe: Recipe
    role: Role
    description: PeerDescription
    journal: Journal
    dht: DHT
    saved: str  # what became of the peer's state when it left, in words

    @property
    def no_link(self) -> str:
        """Why there is no link, in words."""
        ...

    @property
    def peer_id(self) -> PeerID: ...
    @property
    def events(self) -> Events: ...
    def link(self) -> Link | None: ...


class RunWatch:
    """Reads what the optimizer knows, and remembers what the last epochs were like. Any thread may call `look`, which
    never waits. Until `follow` is called it says that the run is being waited for."""

    def __init__(self, peer: WatchedPeer, join_line: Callable[[], str] = str) -> None:
        """`peer` may not be in the network yet. `join_line`: how others join by a recipe file, if there is no link."""
        self._peer = peer
        self._join_line = join_line
        self._optimizer: Optimizer | None = None
        self._evaluations: RunEvaluations | None = None
        self._started = peer.journal.clock()
        self._history = EpochHistory()
        self._said = ""  # while the peer looks for the network: for whom it waits
        self._evaluation: Evaluated | None = None
        self._standstill = Standstill()
        self._unsubscribe = peer.events.subscribe(self._note)
        self.state: State | None = None  # what the peer says that it does; None: `look` asks the optimizer

    def follow(self, optimizer: Optimizer, evaluations: RunEvaluations | None = None) -> None:
        """The peer has joined, or is about to; `evaluations`: None if its run has none."""
        self._optimizer, self._evaluations = optimizer, evaluations

    def last_epoch(self) -> int | None:
        """Returns the epoch after which the run ends, as far as is known; None: there is none."""
        ends = self._evaluations.ends_at if self._evaluations else None
        return min((end for end in (self._peer.recipe.max_epochs, ends) if end is not None), default=None)

    def close(self) -> None:
        self._unsubscribe()

    def _note(self, event: Event) -> None:
        self._history.note(event)
        match event:
            case Noticed():
                self._said = event.text
            case Evaluated():
                self._evaluation = replace(event, time=self._peer.journal.clock())

    def news(self) -> list[EpochLoss]:
        """Returns the losses of epochs that have changed since the last call. Any thread may call it."""
        return self._history.news()

    def look(self) -> RunStatus:
        """The run as this peer sees it now."""
        status, optimizer = self._look_alone(), self._optimizer
        if optimizer is None:
            return status
        epoch, expected = self._epoch(optimizer), optimizer.tracker.expected()
        peers = self._peers(optimizer, epoch, expected, status.now)
        by_text = {peer.text: each for peer, each in expected.items()}
        counted = [by_text.get(each.peer_id, (0.0, 0.0)) for each in peers if each.counts]
        samples = min(float(status.target), sum(done for done, _ in counted))
        eta = seconds_until(status.target - samples, sum(rate for _, rate in counted))
        state, overdue, waits = self._progress(self._state(optimizer, peers), epoch, peers, status.now)
        rate = math.fsum(each.samples_per_second for each in peers if each.counts)
        return replace(
            status,
            state=state,
            epoch=epoch,
            samples=int(samples),
            samples_per_second=0.0 if state == "standing" else rate,
            eta_seconds=eta if 0 < eta < math.inf and state in GOES_ON else None,  # at 0 a round ends the epoch
            run_eta_seconds=self._run_eta(epoch, eta) if state in GOES_ON else None,
            alarm=status.alarm or alarm(optimizer),
            overdue=overdue,
            waits=waits,
            seat=self.seat(),
            download=optimizer.downloading,
            round_bytes=optimizer.round_bytes,
            peers=tuple(peers),
        )

    def _look_alone(self) -> RunStatus:
        """Returns what this peer knows of the run without an optimizer."""
        peer, recipe, link = self._peer, self._peer.recipe, self._peer.link()
        reach = " ".join(filter(None, [reach_in_words(link), needs_in_words(recipe)])) if link else peer.no_link
        return RunStatus(
            run_id=recipe.run_id,
            state=self.state or "synchronizing",
            peer_id=peer.peer_id.text,
            role=peer.role,
            epoch=0,
            samples=0,
            target=recipe.target_batch_size,
            now=peer.journal.clock(),
            started=self._started,
            name=peer.description.name,
            max_epochs=self.last_epoch(),
            losses=tuple(self._history.losses()),
            last_epoch=self._history.last,
            evaluation=self._evaluation,
            best=self._evaluations.best if self._evaluations else None,
            join_line=joining(link, recipe) if link else self._join_line() if peer.dht.is_alive() else "",
            link=str(link or ""),
            install=package_of(recipe),
            link_reach=reach,
            reach=peer.dht.reach.sentence() if peer.dht.is_alive() else "not known yet",
            waits="" if peer.dht.is_alive() else self._said,
            moved=moved_in_words(peer.dht.moved),
            result=peer.saved,
            alarm=clock_alarm(peer.dht.clock.uncorrected),
        )

    def seat(self) -> str:
        """Says why this trainer's samples cannot count, in figures, and what helps; or that the run waits for its
        limit. "": neither. Any thread may call it."""
        if (optimizer := self._optimizer) is None:
            return ""
        if lost := optimizer.seat_lost:
            return f"{lost.sentence}; {lost.remedy}"
        needs, usual = optimizer.seconds_to_send, self._usual()
        if self._peer.role != "trainer" or usual is None or needs <= max(1.0, usual):
            return ""
        most = longest_sending(self._peer.recipe.averaging.averaging_timeout)
        means = "the run waits for this computer"
        if needs > most:
            means = f"a round that sends for more than {roughly(most)} is given up"
        return (
            f"a round sends {format_size(optimizer.round_bytes)}; your limit needs {roughly(needs)}, epochs took "
            f"{roughly(usual)}: {means}; a higher limit helps"
        )

    def _state(self, optimizer: Optimizer, peers: Sequence[PeerStatus]) -> State:
        last = self.last_epoch()
        if self.state is not None:
            return self.state
        if last is not None and optimizer.local_epoch >= last:
            return "finished"
        phase = optimizer.report().phase
        if phase == "stranded":
            return "stranded"
        if phase == "joining" or optimizer.downloading:
            return "synchronizing"
        if not any(peer.computes for peer in peers):
            return "waiting"
        if optimizer.seat_lost:
            return "following"
        return "averaging" if optimizer.is_averaging else "training"

    def _progress(self, state: State, epoch: int, peers: Sequence[PeerStatus], now: float) -> tuple[State, float, str]:
        """Returns whether the run stands still, or waits for somebody to compute; then also for how long, for whom, and
        what helps."""
        if state not in (*GOES_ON, "waiting"):
            return state, 0.0, ""
        usual, rates = self._usual(), [peer.samples_per_second for peer in peers if peer.computes]
        by_rates = seconds_until(self._peer.recipe.target_batch_size, math.fsum(rates)) if rates else None
        overdue = self._standstill.look(now, epoch, by_rates, usual)
        if by_rates is None:
            return state, overdue, deserted(epoch, peers)
        if not overdue:
            return state, 0.0, ""
        averages = self._optimizer is not None and self._optimizer.is_averaging
        return "standing", overdue, stands(epoch, self._standstill.lasted, usual, peers, averages=averages)

    @staticmethod
    def _epoch(optimizer: Optimizer) -> int:
        """Returns the run's epoch. A peer that has not joined yet goes by what most others say: its own state may be
        new, or ahead of the run's."""
        others = [report.epoch for report in optimizer.peers().values() if is_settled(report.phase)]
        if others and not is_settled(optimizer.report().phase):
            return statistics.median_high(others)
        return max(optimizer.global_progress.epoch, optimizer.local_epoch)

    def _usual(self) -> float | None:
        """Returns the median of the seconds that the latest epochs took; None: none has ended here."""
        return statistics.median(lengths) if (lengths := list(self._history.lengths)) else None

    def _run_eta(self, epoch: int, eta: float) -> float | None:
        """Estimates from the latest epochs; None while none is known, nobody computes, or the run has no end."""
        last, usual = self.last_epoch(), self._usual()
        if last is None or epoch >= last or usual is None or not math.isfinite(eta):
            return None
        return (last - epoch - 1) * usual + min(eta, usual)

    def _peers(self, optimizer: Optimizer, epoch: int, expected: Expected, now: float) -> list[PeerStatus]:
        """Returns this peer first. A report's age is by swarm time; moments, like all others here, are by this
        computer's clock."""
        own, apart = optimizer.report(), optimizer.claims.apart()
        others = optimizer.peers()
        reports = {self._peer.peer_id: own, **others}
        shares = self._history.shares({peer.text: report.samples_per_second for peer, report in reports.items()})
        health = self._health(own, own, epoch, 0.0)
        rows = [_row(self._peer.peer_id, own, expected, shares, last_seen=now, health=health, me=True)]
        endpoint = self._peer.dht.endpoint
        for peer, report in others.items():
            age, reported = optimizer.directory.age(peer), optimizer.directory.report_age(peer)
            if not optimizer.directory.is_there(peer):
                health = "not answering"
            elif peer in apart and not _pauses(report):
                health = "waiting" if apart[peer].phase == "stranded" else "another model"
            else:
                health = self._health(report, own, epoch, reported)
            # Rounded to tenths: a page is sent what has changed, and a moment computed from an age would always change.
            heard, told, way = round(now - age, 1), round(now - reported, 1), way_of(endpoint.seen(peer))
            rows.append(_row(peer, report, expected, shares, last_seen=heard, told=told, health=health, way=way))
        return rows

    def _health(self, report: PeerReport, own: PeerReport, epoch: int, age: float) -> Health:
        """A report on its way looks like one epoch behind, and an old one like the epochs that have passed since: both
        count as in step. The state of a peer that has not joined yet says nothing about the others."""
        if _pauses(report):
            return "leaving" if report.leaving else "paused"
        if not is_settled(report.phase):
            return "waiting" if report.phase == "stranded" else "catching up"
        if report.role == "trainer" and report.phase == "following":
            return "line too slow"
        lengths = self._history.lengths
        passed = math.ceil(age / lengths[-1]) if lengths else 0
        unlike = report.epoch == own.epoch == epoch and report.lineage and own.lineage != report.lineage
        unlike = unlike and own.lineage and is_settled(own.phase)
        return "behind" if report.epoch < epoch - 1 - passed or unlike else "in step"


def _pauses(report: PeerReport) -> bool:
    return report.pause in ("pausing", "paused")


def package_of(recipe: Recipe) -> str:
    """Returns the package that a volunteer installs."""
    hub = any(isinstance(dataset, HuggingFaceDataset) for dataset in recipe.datasets)
    return "swarmcli[datasets]" if hub else "swarmcli"


def _row(
    peer: PeerID,
    report: PeerReport,
    expected: Expected,
    shares: Mapping[str, float],
    *,
    last_seen: float,
    health: Health,
    told: float | None = None,
    way: Way | None = None,
    me: bool = False,
) -> PeerStatus:
    """All fields are set at once: with a thousand peers, to replace some afterwards would take longer than all the
    rest."""
    ended = {"failed": "failed", "undecided": "is undecided"}.get(report.last_outcome, "")
    return PeerStatus(
        peer_id=peer.text,
        me=me,
        last_seen=last_seen,
        told=told,
        health=health,
        share=shares.get(peer.text),
        way=way,
        samples=int(expected.get(peer, (0.0, 0.0))[0]),
        trouble=f"its last round {ended}: {report.last_reason}" if ended else "",
        **dict(zip(AS_REPORTED, attrgetter(*AS_REPORTED)(report), strict=True)),
    )


def way_of(seen: Connection | None) -> Way | None:
    """Returns how a peer is connected; None: it is not."""
    if seen is None:
        return None
    return "relayed" if seen.relayed else "punched" if seen.punched else "direct"


def clock_alarm(behind: float) -> str:
    """Says what helps if this computer's clock is `behind` by so many seconds more than swarm corrects; 0: ""."""
    if not behind:
        return ""
    return (
        f"The clock of this computer is about {roughly(abs(behind))} {'behind' if behind > 0 else 'ahead of'} those of "
        "the peers that it dialed, more than the swarm corrects: what this peer says may have expired for them. "
        "Set the clock, let the network set it from now on, and start this peer again."
    )


def alarm(optimizer: Optimizer) -> str:
    """Says if one run trains two models, or a peer cannot get the run's state: who is where, and what helps. "":
    neither."""
    apart, own = optimizer.claims.apart(), optimizer.report()
    if own.phase == "stranded":
        if waits := optimizer.core.catch_up.waits:
            return f"This peer waits: {waits}"
        holders = [report for report in optimizer.peers().values() if report.phase in ("training", "following")]
        if not holders:
            return f"This peer waits: no peer in its reach holds the state of this run. {REMEDY}"
        holds = "holds" if len(holders) == 1 else "hold"
        return f"This peer waits: {_named(holders)} {holds} the state of this run, out of its reach. {REMEDY}"
    if not apart or not any(each.role == "trainer" for each in (own, *optimizer.peers().values())):
        return ""  # before the first trainer, a monitor and an auxiliary have each begun a run of their own
    here = [report for peer, report in optimizer.peers().items() if peer not in apart and report.role != "auxiliary"]
    with_us = _named([each for each in (own, *here) if each.phase in ("training", "following")] or [own])
    training = [report for report in apart.values() if report.phase != "stranded"]
    waiting = [report for report in apart.values() if report.phase == "stranded"]
    told = []
    if training:
        told.append(f"Two models are being trained: one by {with_us}, another by {_named(training)}.")
    if waiting:
        verb = "waits" if len(waiting) == 1 else "wait"
        told.append(f"{_named(waiting, epoch=False)} {verb} to join, but cannot reach the model of {with_us}.")
    return " ".join([*told, REMEDY])


def _named(reports: Sequence[PeerReport], *, epoch: bool = True) -> str:
    """For example "Ada, Bob and Cem (epoch 12)"."""
    named = listed([report.name or report.role for report in reports])
    return f"{named} (epoch {max(report.epoch for report in reports)})" if epoch else named


REMEDY = "Start `swarm monitor` on a computer that all of them can dial: it hands the state from one to the other."
