"""How a run stands at this moment: one object that the terminal and the dashboard ask."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from coordinator_web.source import Health, PeerStatus, RunStatus, State
from swarmcli.events import EpochAdvanced, EpochReported, Event, ReachabilityChanged
from swarmcli.network.addresses import Scope
from swarmcli.network.identity import PeerID
from swarmcli.optim.peers.progress import seconds_until
from swarmcli.recipe import HuggingFaceDataset
from swarmcli.recipe.link import scope_of_places

if TYPE_CHECKING:
    from swarmcli.optim import Optimizer, PeerReport
    from swarmcli.recipe import Link, Recipe
    from swarmcli.roles.peer import RunPeer


MOST_NAMED = 4  # peers in an alarm
RECENT_EPOCHS = 10  # by which the run's end is estimated, and over which the peers' shares are taken
LOSSES = 60  # epochs whose loss is kept
T = TypeVar("T")

Expected = Mapping[PeerID, tuple[float, float]]  # what each peer should have by now: samples, and its rate


class RunWatch:
    """Reads what the optimizer knows, and remembers what the last epochs were like. `look` may be called from any
    thread and never waits. Until `follow` was called it says that the run is being waited for."""

    def __init__(self, peer: RunPeer, join_line: str = "") -> None:
        """`join_line`: how others join by a recipe file, for a peer that has no link."""
        self._peer = peer
        self._join_line = join_line
        self._optimizer: Optimizer | None = None
        self._started = peer.journal.clock()
        self._history = EpochHistory()
        self._reach = peer.dht.reach.sentence()
        self._unsubscribe = peer.events.subscribe(self._note)
        self.state: State | None = None  # what the role says that it does; None: told from the optimizer

    def follow(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._peer.others_of_run = optimizer.peers

    def close(self) -> None:
        self._unsubscribe()

    def _note(self, event: Event) -> None:
        self._history.note(event)
        if isinstance(event, ReachabilityChanged):
            self._reach = event.sentence

    def look(self) -> RunStatus:
        """The run as this peer sees it now."""
        peer, recipe, optimizer = self._peer, self._peer.recipe, self._optimizer
        link = peer.link()
        status = RunStatus(
            run_id=recipe.run_id,
            state="waiting",
            peer_id=peer.peer_id.text,
            role=peer.role,
            epoch=0,
            samples=0,
            target=recipe.target_batch_size,
            now=peer.journal.clock(),
            started=self._started,
            name=peer.description.name,
            max_epochs=recipe.max_epochs,
            losses=tuple(self._history.losses()),
            last_epoch=self._history.last,
            mode=mode_in_words(recipe),
            join_line=command_of(link) if link else self._join_line,
            link=str(link or ""),
            install=install_command(recipe),
            link_reach=" ".join(
                filter(None, [reach_in_words(link) if link else peer.no_link, access_in_words(recipe)])
            ),
            reach=self._reach,
            result=peer.saved,
        )
        if optimizer is None:
            return status
        epoch, expected = max(optimizer.global_progress.epoch, optimizer.local_epoch), optimizer.expected_samples()
        peers = self._peers(optimizer, epoch, expected, status.now)
        counted = [expected.get(PeerID.parse(each.peer_id), (0.0, 0.0)) for each in peers if each.counts]
        samples = min(float(recipe.target_batch_size), sum(done for done, _ in counted))
        eta = seconds_until(recipe.target_batch_size - samples, sum(rate for _, rate in counted))
        state = self._state(optimizer, peers)
        return replace(
            status,
            state=state,
            epoch=epoch,
            samples=int(samples),
            samples_per_second=math.fsum(each.samples_per_second for each in peers if each.counts),
            eta_seconds=eta if math.isfinite(eta) and state != "stranded" else None,
            run_eta_seconds=self._run_eta(epoch, eta) if state in ("training", "averaging") else None,
            alarm=alarm(optimizer),
            peers=tuple(peers),
        )

    def _state(self, optimizer: Optimizer, peers: Sequence[PeerStatus]) -> State:
        last = self._peer.recipe.max_epochs
        if self.state is not None:
            return self.state
        if last is not None and optimizer.local_epoch >= last:
            return "finished"
        phase = optimizer.report().phase
        if phase in ("joining", "stranded"):
            return "synchronizing" if phase == "joining" else "stranded"
        if not any(peer.role == "trainer" for peer in peers):
            return "waiting"
        return "averaging" if optimizer.is_averaging else "training"

    def _run_eta(self, epoch: int, eta: float) -> float | None:
        """By what the latest epochs took; None while none is known, nobody computes, or the run has no end."""
        last, lengths = self._peer.recipe.max_epochs, self._history.lengths
        if last is None or epoch >= last or not lengths or not math.isfinite(eta):
            return None
        usual = statistics.median(lengths)
        return (last - epoch - 1) * usual + min(eta, usual)

    def _peers(self, optimizer: Optimizer, epoch: int, expected: Expected, now: float) -> list[PeerStatus]:
        """This peer first. A report's age is told by swarm time; the moment, like all others here, by this clock."""
        own, apart, swarm_now = optimizer.report(), optimizer.peers_apart(), self._peer.dht.clock.now()
        health: Health = "waiting" if own.phase == "stranded" else "in step"
        rows = [replace(_row(self._peer.peer_id, own, expected), me=True, last_seen=now, health=health)]
        for peer, report in optimizer.peers().items():
            age = min(optimizer.seconds_since_heard(peer), swarm_now - report.time)
            if not optimizer.answers(peer):
                health = "not answering"
            elif peer in apart:
                health = "waiting" if apart[peer].phase == "stranded" else "another model"
            else:
                health = self._in_step(report, own, epoch, age)
            # In whole tenths: a page is sent what has changed, and a moment that is told from an age never stays.
            rows.append(replace(_row(peer, report, expected), last_seen=round(now - age, 1), health=health))
        shares = self._history.shares({row.peer_id: row.samples_per_second for row in rows})
        return [replace(row, share=shares.get(row.peer_id)) for row in rows]

    def _in_step(self, report: PeerReport, own: PeerReport, epoch: int, age: float) -> Health:
        """A report on its way looks like one epoch behind, and an old one like the epochs that have passed since: both
        count as in step."""
        lengths = self._history.lengths
        passed = math.ceil(age / lengths[-1]) if lengths else 0
        unlike = report.epoch == epoch and report.lineage and own.lineage and report.lineage != own.lineage
        return "behind" if report.epoch < epoch - 1 - passed or unlike else "in step"


def command_of(link: Link) -> str:
    """What a stranger types. In double quotes, which every shell knows: a link holds a question mark."""
    return f'swarm join "{link}"'


def install_command(recipe: Recipe) -> str:
    """What somebody types who has nothing installed but pipx."""
    hub = any(isinstance(dataset, HuggingFaceDataset) for dataset in recipe.datasets)
    return 'pipx install "swarmcli[datasets]"' if hub else "pipx install swarmcli"


def reach_in_words(link: Link) -> str:
    """For whom a link is no use; "" if it is for everyone."""
    match scope_of_places(link.places):
        case Scope.HOST:
            return "This link works on this machine only: no other address is known at which this peer can be dialed."
        case Scope.LAN:
            return "This link works within this network only."
        case _:
            return ""


def access_in_words(recipe: Recipe) -> str:
    """What else than the link it takes to join; "" if nothing."""
    if recipe.access == "open":
        return ""
    return (
        "This run is closed: whoever joins needs an invitation, which its owner puts into a link with `swarm invite`."
    )


class EpochHistory:
    """What the last epochs were like, by this peer's own steps and by what others report of theirs."""

    def __init__(self) -> None:
        self.last: EpochAdvanced | None = None  # of those that were stepped here
        self.lengths: deque[float] = deque(maxlen=RECENT_EPOCHS)  # seconds
        self._reached = -1  # this epoch
        self._own: dict[int, float] = {}  # epoch → this peer's loss
        self._reports: dict[int, dict[str, EpochReported]] = {}  # epoch → peer → what it told

    def note(self, event: Event) -> None:
        match event:
            case EpochAdvanced():
                self._reached = event.epoch
                if event.samples:  # otherwise its state was another peer's, and nobody knows how long it took
                    self.last = event
                    if event.seconds > 0:
                        self.lengths.append(event.seconds)
                if event.loss is not None:
                    self._own = {**self._own, event.epoch: event.loss}
            case EpochReported():
                told = {**self._reports.get(event.epoch, {}), event.peer: event}
                self._reports = {**self._reports, event.epoch: told}
            case _:
                return
        # Replaced and never changed: `look` reads them in other threads. Of epochs that are yet to come anybody can
        # claim anything, so only the nearest of those are kept.
        self._own, self._reports = _last(self._own, self._reached), _last(self._reports, self._reached)

    def losses(self) -> list[float]:
        """The swarm's, by epoch, up to the one that this peer has reached: the mean of what was reported, weighted by
        rates, and this peer's own where nobody has told anything."""
        told = {epoch: _mean(reports.values()) for epoch, reports in self._reports.items() if epoch <= self._reached}
        return [loss for _, loss in sorted((self._own | told).items())][-LOSSES:]

    def shares(self, rates: Mapping[str, float]) -> dict[str, float]:
        """Each peer's part, 0 to 1, of the samples that all of them computed over the last epochs.

        Counts of samples run since a peer's start, so what it computed is how much its count grew; a peer that reported
        once is not in the result. While nobody reported twice, `rates` (of those present) decide.
        """
        counts: dict[str, list[int]] = {}
        for epoch, reports in self._reports.items():
            if self._reached - RECENT_EPOCHS < epoch <= self._reached:
                for report in reports.values():
                    counts.setdefault(report.peer, []).append(report.samples)
        return _parts({peer: max(each) - min(each) for peer, each in counts.items() if len(each) > 1}) or _parts(rates)


def _last(by_epoch: Mapping[int, T], reached: int) -> dict[int, T]:
    return {epoch: each for epoch, each in by_epoch.items() if reached - LOSSES < epoch <= reached + 2}


def _mean(reports: Iterable[EpochReported]) -> float:
    weighted = [(report.loss, max(report.samples_per_second, 1e-3)) for report in reports]
    return math.fsum(loss * weight for loss, weight in weighted) / math.fsum(weight for _, weight in weighted)


def _parts(amounts: Mapping[str, float]) -> dict[str, float]:
    total = math.fsum(amounts.values())
    return {peer: amount / total for peer, amount in amounts.items()} if 0.0 < total < math.inf else {}


def _row(peer: PeerID, report: PeerReport, expected: Expected) -> PeerStatus:
    failed = report.last_outcome in ("failed", "undecided")
    return PeerStatus(
        peer_id=peer.text,
        role=report.role,
        epoch=report.epoch,
        name=report.name,
        device=report.device,
        client_mode=report.client_mode,
        samples=int(expected.get(peer, (0.0, 0.0))[0]),
        samples_per_second=report.samples_per_second,
        loss=report.loss,
        trouble=f"its last round was {report.last_outcome}: {report.last_reason}" if failed else "",
        drift=report.drift,
    )


def alarm(optimizer: Optimizer) -> str:
    """One run, two models, or a peer that cannot get at the one there is: who is where, and what helps. "": neither."""
    apart, own = optimizer.peers_apart(), optimizer.report()
    if own.phase == "stranded":
        holders = [report for report in optimizer.peers().values() if report.phase in ("training", "following")]
        if not holders:
            return f"This peer waits: nobody whom it can reach holds the state of this run. {REMEDY}"
        holds = "holds" if len(holders) == 1 else "hold"
        return f"This peer waits: {_named(holders)} {holds} the state of this run, out of its reach. {REMEDY}"
    if not apart:
        return ""
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
    names = [report.name or report.role for report in reports]
    if len(names) > MOST_NAMED:
        names = [*names[:MOST_NAMED], f"{len(names) - MOST_NAMED} more"]
    named = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    return f"{named} (epoch {max(report.epoch for report in reports)})" if epoch else named


REMEDY = "Start `swarm monitor` on a computer that all of them can dial: it hands the state from one to the other."
METHODS = {"plain": "", "powersgd": "PowerSGD", "poweref": "PowerEF"}


def mode_in_words(recipe: Recipe) -> str:
    """How the run averages, for people: "synchronous" where nothing was chosen; and whether this peer is a site."""
    gradients, delay, compression = recipe.gradient_averaging, recipe.delay, recipe.compression
    codec = compression.state_averaging if recipe.local_updates.enabled else compression.gradients
    parts = [
        "local updates" if recipe.local_updates.enabled else "",
        f"{METHODS[gradients.method]} of rank {gradients.rank}" if METHODS[gradients.method] else "",
        "delayed averaging" if delay.grad_averaging else "delayed step" if delay.step else "",
        "" if codec == "none" else codec.replace("_", " ") + " on the wire",
    ]
    mode = ", ".join(filter(None, parts)) or "synchronous"
    processes = recipe.local.site.processes
    return mode if processes == 1 else f"{mode}, a site of {processes}"
