"""How a run stands at this moment, for the dashboard and the terminal."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from coordinator_web.source import LivePeer, LiveStatus, State
from swarmcli.events import EpochAdvanced, Event
from swarmcli.network.identity import PeerID
from swarmcli.optim.peers.progress import seconds_until

if TYPE_CHECKING:
    from swarmcli.optim import Optimizer, PeerReport
    from swarmcli.recipe import Recipe
    from swarmcli.roles.peer import RunPeer


MOST_NAMED = 4  # peers in an alarm
RECENT_EPOCHS = 10  # by which the run's end is estimated


class RunWatch:
    """Reads what the optimizer knows. `status` may be called from any thread and never waits.

    Until `follow` was called it says that the run is being waited for.
    """

    def __init__(self, peer: RunPeer, join_line: str = "") -> None:
        self._peer = peer
        self.join_line = join_line
        self._optimizer: Optimizer | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._lengths: deque[float] = deque(maxlen=RECENT_EPOCHS)  # seconds
        self.state: State | None = None  # what the role says that it does; None: told from the optimizer

    def follow(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._unsubscribe = self._peer.events.subscribe(self._note)

    def close(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()

    def _note(self, event: Event) -> None:
        if isinstance(event, EpochAdvanced) and event.samples and event.seconds > 0:
            self._lengths.append(event.seconds)

    def status(self) -> LiveStatus:
        peer, optimizer = self._peer, self._optimizer
        recipe = peer.recipe
        if optimizer is None:
            return LiveStatus(
                run_id=recipe.run_id, state="waiting", peer_id=peer.peer_id.text, role=peer.role, epoch=0, samples=0,
                target=recipe.target_batch_size, name=peer.description.name, max_epochs=recipe.max_epochs,
                mode=mode_in_words(recipe), join_line=self.join_line,
            )  # fmt: skip
        epoch = max(optimizer.global_progress.epoch, optimizer.local_epoch)
        expected = optimizer.expected_samples()
        peers = (self._self(optimizer, expected), *self._others(optimizer, expected))
        counted = [expected.get(PeerID.parse(each.peer_id), (0.0, 0.0)) for each in peers if _counts(each)]
        samples = min(float(recipe.target_batch_size), sum(done for done, _ in counted))
        eta = seconds_until(recipe.target_batch_size - samples, sum(rate for _, rate in counted))
        state = self._state(optimizer, peers)
        return LiveStatus(
            run_id=recipe.run_id,
            state=state,
            peer_id=peer.peer_id.text,
            role=peer.role,
            epoch=epoch,
            samples=int(samples),
            target=recipe.target_batch_size,
            name=peer.description.name,
            eta_seconds=eta if math.isfinite(eta) and state != "stranded" else None,
            run_eta_seconds=self._run_eta(epoch, eta) if state in ("training", "averaging") else None,
            alarm=alarm(optimizer),
            max_epochs=recipe.max_epochs,
            lineage=optimizer.report().lineage,
            mode=mode_in_words(recipe),
            join_line=self.join_line,
            result=peer.saved,
            peers=peers,
        )

    def _state(self, optimizer: Optimizer, peers: tuple[LivePeer, ...]) -> State:
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
        last = self._peer.recipe.max_epochs
        if last is None or epoch >= last or not self._lengths or not math.isfinite(eta):
            return None
        usual = statistics.median(self._lengths)
        return (last - epoch - 1) * usual + min(eta, usual)

    def _self(self, optimizer: Optimizer, expected: Mapping[PeerID, tuple[float, float]]) -> LivePeer:
        report = optimizer.report()
        row = self._row(self._peer.peer_id, report, expected)
        return replace(row, apart="waiting") if report.phase == "stranded" else row

    def _others(self, optimizer: Optimizer, expected: Mapping[PeerID, tuple[float, float]]) -> list[LivePeer]:
        apart = optimizer.peers_apart()
        return [
            replace(
                self._row(peer, report, expected),
                seen_seconds_ago=min(optimizer.seconds_since_heard(peer), self._peer.dht.clock.now() - report.time),
                answers=optimizer.answers(peer),
                apart=_how_apart(apart[peer]) if peer in apart else "",
            )
            for peer, report in optimizer.peers().items()
        ]

    def _row(self, peer: PeerID, report: PeerReport, expected: Mapping[PeerID, tuple[float, float]]) -> LivePeer:
        return LivePeer(
            peer_id=peer.text,
            role=report.role,
            epoch=report.epoch,
            name=report.name,
            samples=int(expected.get(peer, (0.0, 0.0))[0]),
            samples_per_second=report.samples_per_second,
            loss=report.loss,
            lineage=report.lineage,
            device=report.device,
            client_mode=report.client_mode,
            drift=report.drift,
            round_outcome=report.last_outcome,
            round_reason=report.last_reason,
        )


def _counts(peer: LivePeer) -> bool:
    """Whether what this peer computes goes into the epoch: who is gone, or trains another model, adds nothing."""
    return peer.answers and not peer.apart


def _how_apart(report: PeerReport) -> Literal["waiting", "another model"]:
    return "waiting" if report.phase == "stranded" else "another model"


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
