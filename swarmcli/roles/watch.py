"""How a run stands at this moment, for the dashboard, the terminal, and the journal's history of reports."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from coordinator_web.source import LivePeer, LiveStatus, State
from swarmcli.events import EpochAdvanced, Event, PeerSeen
from swarmcli.journal import ReportRecord
from swarmcli.network.identity import PeerID

if TYPE_CHECKING:
    from swarmcli.optim import Optimizer, PeerReport
    from swarmcli.recipe import Recipe
    from swarmcli.roles.peer import RunPeer


class RunWatch:
    """Reads what the optimizer knows. `status` may be called from any thread and never waits.

    Until `follow` was called it says that the run is being waited for.
    """

    def __init__(self, peer: RunPeer, join_line: str = "") -> None:
        self._peer = peer
        self.join_line = join_line
        self._optimizer: Optimizer | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._recorded: dict[PeerID, int] = {}  # the last epoch of each peer that the journal has
        self.state: State | None = None  # what the role says that it does; None: told from the optimizer

    def follow(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._unsubscribe = self._peer.events.subscribe(self._note)

    def close(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()

    # the journal's history

    def _note(self, event: Event) -> None:
        optimizer = self._optimizer
        if optimizer is None:
            return
        if isinstance(event, EpochAdvanced):
            self._record(self._peer.peer_id, optimizer.report())
        elif isinstance(event, PeerSeen) and not event.left:
            peer = PeerID.parse(event.peer)
            if report := optimizer.peers().get(peer):
                self._record(peer, report)

    def _record(self, peer: PeerID, report: PeerReport) -> None:
        """Every epoch that this report tells of and none before did: reports are read less often than epochs end."""
        if report.role != "trainer":
            return
        known = self._recorded.get(peer, -1)
        for ended in report.recent:
            if ended.epoch > known:
                self._recorded[peer] = ended.epoch
                self._peer.journal.report(
                    ReportRecord(
                        time=time.time(),
                        peer=peer.text,
                        epoch=ended.epoch,
                        loss=ended.loss,
                        samples=ended.samples,
                        samples_per_second=report.samples_per_second,
                        outcome=report.last_outcome,
                        reason=report.last_reason,
                    )
                )

    # this moment

    def status(self) -> LiveStatus:
        peer, optimizer = self._peer, self._optimizer
        recipe = peer.recipe
        if optimizer is None:
            return LiveStatus(
                run_id=recipe.run_id, state="waiting", peer_id=peer.peer_id.text, role=peer.role, epoch=0, samples=0,
                target=recipe.target_batch_size, name=peer.description.name, max_epochs=recipe.max_epochs,
                mode=mode_in_words(recipe), join_line=self.join_line,
            )  # fmt: skip
        progress = optimizer.global_progress
        peers = (self._self(optimizer), *self._others(optimizer))
        eta = progress.eta_next_epoch - peer.dht.clock.now()
        return LiveStatus(
            run_id=recipe.run_id,
            state=self._state(optimizer, peers),
            peer_id=peer.peer_id.text,
            role=peer.role,
            epoch=max(progress.epoch, optimizer.local_epoch),
            samples=progress.samples_accumulated,
            target=recipe.target_batch_size,
            name=peer.description.name,
            eta_seconds=max(0.0, eta) if math.isfinite(eta) else None,
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
        if optimizer.report().phase == "joining":
            return "synchronizing"
        if not any(peer.role == "trainer" for peer in peers):
            return "waiting"
        return "averaging" if optimizer.is_averaging else "training"

    def _self(self, optimizer: Optimizer) -> LivePeer:
        return self._row(
            self._peer.peer_id, optimizer.report(), optimizer.samples_in_epoch().get(self._peer.peer_id, 0)
        )

    def _others(self, optimizer: Optimizer) -> list[LivePeer]:
        samples = optimizer.samples_in_epoch()
        return [self._row(peer, report, samples.get(peer, 0)) for peer, report in optimizer.peers().items()]

    def _row(self, peer: PeerID, report: PeerReport, samples: int) -> LivePeer:
        return LivePeer(
            peer_id=peer.text,
            role=report.role,
            epoch=report.epoch,
            name=report.name,
            samples=samples,
            samples_per_second=report.samples_per_second,
            loss=report.loss,
            lineage=report.lineage,
            device=report.device,
            client_mode=report.client_mode,
            seen_seconds_ago=max(0.0, self._peer.dht.clock.now() - report.time),
            drift=report.drift,
            round_outcome=report.last_outcome,
            round_reason=report.last_reason,
        )


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
