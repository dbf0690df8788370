"""A run that never was, for looking at the dashboard and for testing it: everything moves by a clock that is given."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from coordinator_web.source import PeerStatus, RunStatus, State
from swarmcli.events import EpochAdvanced, RoundFinished
from swarmcli.journal import Line, Totals

START = 1_790_000_000.0
TARGET = 4096
LINK = f"swarm://{'k7q2m4xw5z' * 5}ab@203.0.113.7:31330/stdlib-lm?fingerprint=ntktqvpwzxduohvk3q7mjeneuz3nhh55"
JOIN_LINE = f'swarm join "{LINK}"'
REACH = "others can dial this peer at tcp://203.0.113.7:31330, by a port that its router has opened for it"
REASONS = ("no part arrived for 4.0 s", "the connection was lost", "a part with NaN came from it")


def peer_row(name: str, role: str = "trainer", **changes: object) -> PeerStatus:
    digits = random.Random(name).choices("abcdefghijklmnopqrstuvwxyz234567", k=52)
    row = PeerStatus(peer_id="".join(digits), name=name, role=role, epoch=0, device="cpu", last_seen=START)
    return replace(row, **changes)


TRAINERS = (
    peer_row("attic-3090", device="cuda, RTX 3090", samples_per_second=212.0, drift=0.0),
    peer_row("büro-mac", device="mps, M3", samples_per_second=96.0, drift=3.1e-7),
    peer_row("garage", device="cpu, 16 cores", samples_per_second=41.0, client_mode=True),
    peer_row("lab-17", device="cuda, A4000", samples_per_second=168.0),
)
OTHERS = (
    peer_row("relay-fra", "auxiliary", device="cpu, 4 cores", client_mode=True),
    peer_row("monitor", "monitor", device="cpu, 2 cores", me=True),
)


@dataclass
class FakeRun:
    """Stands in for a DashboardSource. `now` is the moment that is shown; set it, or `advance` it."""

    finished_epochs: int = 0
    state: State = "training"
    run_id: str = "stdlib-lm"
    join_line: str = JOIN_LINE
    link: str = LINK
    link_reach: str = ""
    part: float = 0.62  # of the epoch that is under way
    with_own: bool = False
    alarm: str = ""
    max_epochs: int | None = 200
    run_eta: float | None = 14_000.0
    mode: str = "synchronous"
    result: str = ""
    people: list[PeerStatus] = field(default_factory=lambda: [*TRAINERS, *OTHERS])
    extra_events: list[Line] = field(default_factory=list)

    @property
    def now(self) -> float:
        return START + (self.finished_epochs + self.part) * 8.0

    def advance(self, part: float) -> None:
        self.part += part
        while self.part >= 1.0:
            self.part -= 1.0
            self.finished_epochs += 1

    def _trainers(self) -> list[PeerStatus]:
        return [peer for peer in self.people if peer.role == "trainer"]

    def look(self) -> RunStatus:
        rate = sum(peer.samples_per_second for peer in self._trainers())
        samples = round(TARGET * self.part) if self._trainers() else 0
        me = next((peer for peer in self.people if peer.me), OTHERS[-1])
        return RunStatus(
            run_id=self.run_id,
            state=self.state,
            peer_id=me.peer_id,
            role=me.role,
            name=me.name,
            epoch=self.finished_epochs,
            max_epochs=self.max_epochs,
            samples=samples,
            target=TARGET,
            eta_seconds=(TARGET - samples) / rate if rate else None,
            run_eta_seconds=self.run_eta,
            alarm=self.alarm,
            samples_per_second=rate,
            losses=tuple(loss_at(epoch) for epoch in range(1, self.finished_epochs + 1))[-60:],
            started=START,
            now=self.now,
            join_line=self.join_line,
            link=self.link,
            link_reach=self.link_reach,
            mode=self.mode,
            reach=REACH,
            result=self.result,
            peers=tuple(self._peers()),
            own=self._own() if self.with_own else None,
        )

    def _own(self) -> Totals:
        moved = self.finished_epochs * 41_300_000, self.finished_epochs * 38_900_000
        return Totals(self.finished_epochs, self.finished_epochs * 1680, self.finished_epochs - 3, 2, 1, *moved)

    def _peers(self) -> list[PeerStatus]:
        rate = sum(peer.samples_per_second for peer in self._trainers()) or 1.0
        return [
            replace(
                peer,
                epoch=self.finished_epochs - (peer.health == "behind"),
                last_seen=START - (140.0 if peer.health == "not answering" else 1.0 + 1.7 * position),
                share=peer.samples_per_second / rate if peer.role == "trainer" else None,
                loss=loss_at(self.finished_epochs) + 0.03 * position if peer.role == "trainer" else None,
            )
            for position, peer in enumerate(self.people)
        ]

    def epochs(self, *, after: int = -1, limit: int = 600) -> Sequence[EpochAdvanced]:
        return [epoch_row(epoch) for epoch in range(max(1, after + 1), self.finished_epochs + 1)][-limit:]

    def rounds(self, *, after: int = 0, limit: int = 100) -> Sequence[RoundFinished]:
        return [round_row(number) for number in range(max(1, after + 1), self.finished_epochs + 1)][-limit:]

    def events(self, *, after: int = 0, limit: int = 200) -> Sequence[Line]:
        written = [event_row(number) for number in range(1, self.finished_epochs // 4 + 1)] + self.extra_events
        return [row for row in written if row.id > after][-limit:]


def loss_at(epoch: int) -> float:
    noise = random.Random(epoch).gauss(0, 0.035)
    return 1.62 + 3.9 * math.exp(-epoch / 22) + 0.5 * math.exp(-epoch / 140) + noise


def epoch_row(epoch: int) -> EpochAdvanced:
    wobble = random.Random(epoch + 7).uniform(-0.5, 0.9)
    rate = (340 if epoch < 60 else 517) + 12 * wobble
    seconds = TARGET / rate + 0.4
    return EpochAdvanced(
        epoch=epoch,
        lineage="ab" * 32,
        time=START + epoch * 8.0,
        loss=loss_at(epoch),
        samples=TARGET + epoch % 17,
        own_samples=0,
        peers=3 if epoch < 60 else 4,
        seconds=seconds,
        averaging_seconds=0.34 + 0.05 * wobble,
    )


def round_row(number: int) -> RoundFinished:
    draw = random.Random(number * 31)
    attic, mac, garage, lab, relay = (peer.peer_id for peer in (*TRAINERS, OTHERS[0]))
    group = (attic, garage, lab, relay, mac)[: 4 if number < 60 else 5]
    failed = number % 23 == 7
    left = {garage: draw.choice(REASONS)} if number % 11 == 5 else {}
    return RoundFinished(
        id=number,
        time=START + number * 8.0 - 0.2,
        round_id="ab" * 32,
        purpose="stdlib-lm_state" if number % 9 == 3 else "stdlib-lm_grads",
        epoch=number - 1,
        outcome="failed" if failed else "committed",
        reason="lab-17 was killed while it reduced; nobody else holds its parts" if failed else "",
        leader=attic,
        members=group,
        contributors=tuple(peer for peer in group if peer != relay and peer not in left),
        left_out=left,
        seconds={"looking for group": 1.3, "awaiting trigger": 0.02, "running all-reduce": draw.uniform(0.28, 0.44)},
        bytes_sent=draw.randrange(38_000_000, 43_000_000),
        bytes_received=draw.randrange(38_000_000, 43_000_000),
    )


def event_row(number: int) -> Line:
    lines = (
        ("info", "joined", "trainer lab-17 joined"),
        ("info", "donated", "gave the state of epoch {} to k7q2m4xw5z (12.4 MB)"),
        ("info", "checkpoint", "checkpoint of epoch {} at runs/monitor-1/checkpoints/epoch-{} (12.4 MB)"),
        ("warning", "refused", "refused recipe of 3kd8s0qpz1: its recipe differs in optimizer.learning_rate"),
        ("info", "left", "trainer garage left"),
        ("info", "left out", "round at epoch {} went on without garage (no part arrived for 4.0 s)"),
    )
    level, kind, text = lines[number % len(lines)]
    return Line(level, kind, "", text.format(number * 4, number * 4), id=number, time=START + number * 32.0)
