"""A run that never was, for looking at the dashboard and for testing it: everything moves by a clock that is given."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from swarmcli.errors import RecipeError
from swarmcli.events import ActivityStatus, Contribution, EpochAdvanced, EpochReported, Evaluated, Reason, RoundFinished
from swarmcli.journal import Axis, Failure, Line, Moment, Totals
from swarmcli.recipe.limits import Limits, as_text
from swarmcli.run import views
from swarmcli.run.source import DashboardSource, Providers
from swarmcli.run.values import Alert, CheckpointShown, History, PeerDetails, PeerStatus, RunStatus, State

START = 1_790_000_000.0
TARGET = 4096
LINK = f"swarm://{'k7q2m4xw5z' * 5}ab@203.0.113.7:31330/stdlib-lm/fingerprint=ntktqvpwzxduohvk3q7mjeneuz3nhh55"
JOIN_LINE = f'swarm join "{LINK}"'
REACH = "others can dial this peer at tcp://203.0.113.7:31330, by a port that its router has opened for it"
REASONS = ("no part arrived for 4.0 s", "the connection was lost", "a part with NaN came from it")


def peer_row(name: str, role: str = "trainer", **changes: object) -> PeerStatus:
    digits = random.Random(name).choices("abcdefghijklmnopqrstuvwxyz234567", k=52)
    row = PeerStatus(peer_id="".join(digits), name=name, role=role, epoch=0, device="cpu", last_seen=START)
    return replace(row, **changes)


TRAINERS = (
    peer_row("attic-3090", device="cuda, RTX 3090", samples_per_second=212.0, drift=0.0, way="direct"),
    peer_row("büro-mac", device="mps, M3", samples_per_second=96.0, drift=3.1e-7),
    peer_row("garage", device="cpu, 16 cores", samples_per_second=41.0, client_mode=True, way="relayed"),
    peer_row("lab-17", device="cuda, A4000", samples_per_second=168.0),
)
OTHERS = (
    peer_row("relay-fra", "auxiliary", device="cpu, 4 cores", client_mode=True, way="punched"),
    peer_row("monitor", "monitor", device="cpu, 2 cores", me=True),
)


@dataclass
class FakeRun(DashboardSource):
    """Puts together what pages show as the real one does, of values that are made up. `advance` moves it."""

    finished_epochs: int = 0
    state: State = "training"
    run_id: str = "stdlib-lm"
    join_line: str = JOIN_LINE
    link: str = LINK
    link_reach: str = ""
    install: str = "swarmcli"
    part: float = 0.62  # of the epoch that is under way
    alarm: str = ""
    waits: str = ""
    seat: str = ""
    max_epochs: int | None = 200
    run_eta: float | None = 670.0
    result: str = ""
    people: list[PeerStatus] = field(default_factory=lambda: [*TRAINERS, *OTHERS])
    extra_events: list[Line] = field(default_factory=list)
    activity: ActivityStatus = field(default_factory=ActivityStatus)
    limits: Mapping[str, object] = field(default_factory=dict)
    alerts: list[Alert] = field(default_factory=list)
    home: Path | None = None  # the directory that holds checkpoints
    rests_on: str = "This is the count of one peer, Ada: 50% of the 1,000 samples up to epoch 41."

    def __post_init__(self) -> None:
        self._totals = Totals()
        self._providers = Providers(
            activity=lambda: self.activity,
            limits=lambda: self.limits,
            contributions=self.contributions,
            rests_on=lambda: self.rests_on,
            alerts=lambda: self.alerts,
        )

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
        measured = evaluation(self.finished_epochs // 10 * 10) if self.finished_epochs >= 10 else None
        return RunStatus(
            run_id=self.run_id, state=self.state, peer_id=me.peer_id, role=me.role, name=me.name,
            epoch=self.finished_epochs, max_epochs=self.max_epochs, samples=samples, target=TARGET,
            eta_seconds=(TARGET - samples) / rate if rate else None, run_eta_seconds=self.run_eta, alarm=self.alarm,
            waits=self.waits, seat=self.seat, samples_per_second=rate,
            losses=tuple(loss_at(epoch) for epoch in range(1, self.finished_epochs + 1))[-60:], started=START,
            last_epoch=epoch_row(self.finished_epochs) if self.finished_epochs else None, now=self.now,
            join_line=self.join_line, link=self.link, link_reach=self.link_reach, install=self.install,
            reach=REACH, result=self.result, peers=tuple(sorted(self._peers(), key=views.listing_order)),
            evaluation=measured, evaluated=views.evaluated(measured, None) if measured else "",
        )  # fmt: skip

    def _peers(self) -> list[PeerStatus]:
        rate = sum(peer.samples_per_second for peer in self._trainers()) or 1.0
        return [
            replace(
                peer,
                epoch=self.finished_epochs - (peer.health == "behind"),
                last_seen=self.now - (140.0 if peer.health == "not answering" else 1.0 + 1.7 * position),
                share=peer.samples_per_second / rate if peer.role == "trainer" else None,
                loss=loss_at(self.finished_epochs) + 0.03 * position if peer.role == "trainer" else None,
            )
            for position, peer in enumerate(self.people)
        ]

    def peer(self, peer_id: str) -> PeerDetails | None:
        shown = next((peer for peer in self.look().peers if peer.peer_id == peer_id), None)
        if shown is None:
            return None
        epochs = range(max(1, self.finished_epochs - 99), self.finished_epochs + 1)
        told = (
            EpochReported(
                peer=peer_id,
                epoch=epoch,
                time=START + epoch * 8.0,
                loss=loss_at(epoch) + 0.02,
                samples=int(epoch * 8 * shown.samples_per_second),
                samples_per_second=shown.samples_per_second * random.Random(epoch).uniform(0.9, 1.1),
            )
            for epoch in epochs
        )
        return PeerDetails(
            peer=shown,
            first_seen=START + 3.0,
            history=tuple(told) if shown.role == "trainer" else (),
            rounds=tuple(self._rounds_of(peer_id)),
            contribution=next((each for each in self.contributions() if each.peer == peer_id), None),
        )

    def _rounds_of(self, peer_id: str) -> Iterable[RoundFinished]:
        for each in reversed(self.rounds(limit=50)):
            if peer_id in (*each.members, *each.left_out):
                yield each

    def history(self, *, begin: float | None = None, points: int = 300, by: Axis = "time") -> History:
        every = [moment(epoch) for epoch in range(1, self.finished_epochs + 1)]
        at = (lambda each: each.epoch) if by == "epoch" else (lambda each: each.time)
        shown = [each for each in every if (begin or 0) <= at(each)]
        return History(
            points=tuple(shown[:: max(1, math.ceil(len(shown) / points))]),
            evaluations=tuple(evaluation(each.epoch) for each in shown if each.epoch % 10 == 0),
        )

    def failures(self) -> Sequence[Failure]:
        span = {"first": START + 40.0, "last": self.now - 30.0}
        return [
            Failure(reason=reason, what=what, count=self.finished_epochs // every, example=example, **span)
            for what, reason, every, example in FAILURES
            if self.finished_epochs >= every
        ]

    def checkpoints(self) -> Sequence[CheckpointShown]:
        newest = self.finished_epochs // 20 * 20
        return [
            CheckpointShown(
                name=f"epoch-{epoch}",
                epoch=epoch,
                time=START + epoch * 8.0,
                bytes=12_412_000,
                latest=epoch == newest,
                loss=loss_at(epoch) + 0.1,
                best=epoch == newest,
            )
            for epoch in range(newest, max(0, newest - 100), -20)
        ]

    def checkpoint(self, name: str) -> Path | None:
        if self.home is None or name not in [each.name for each in self.checkpoints()]:
            return None
        return self.home / name

    def contributions(self) -> Sequence[Contribution]:
        given = [
            Contribution(
                peer=peer.peer_id,
                name=peer.name,
                team="makerspace" if position % 2 else "",
                samples=int(peer.samples_per_second * self.finished_epochs * 8),
                hours=self.finished_epochs * 8 / 3600,
                rounds=self.finished_epochs,
                reduced_bytes=self.finished_epochs * 9_800_000,
                uptime=self.finished_epochs * 8.0,
                first=START,
                last=self.now,
            )
            for position, peer in enumerate(self.people)
        ]
        return sorted(given, key=lambda each: -each.samples)

    def export(self, name: str) -> tuple[type[Any], Iterable[Any]]:
        lists: Mapping[str, tuple[type[Any], Iterable[Any]]] = {
            "epochs": (EpochAdvanced, self.epochs()),
            "evaluations": (Evaluated, []),
            "rounds": (RoundFinished, self.rounds()),
            "peers": (PeerStatus, self.look().peers),
            "contributions": (Contribution, self.contributions()),
        }
        return lists[name]

    def epochs(self, *, after: int = -1, limit: int = 600) -> Sequence[EpochAdvanced]:
        return [epoch_row(epoch) for epoch in range(max(1, after + 1), self.finished_epochs + 1)][-limit:]

    def rounds(self, *, after: int = 0, limit: int = 100) -> Sequence[RoundFinished]:
        return [round_row(number) for number in range(max(1, after + 1), self.finished_epochs + 1)][-limit:]

    def events(self, *, after: int = 0, limit: int = 200) -> Sequence[Line]:
        written = [event_row(number) for number in range(1, self.finished_epochs // 4 + 1)] + self.extra_events
        return [row for row in written if row.id > after][-limit:]


FAILURES = (
    ("round", "… was killed while it reduced; nobody else holds its parts", 23, "lab-17 was killed while it reduced"),
    ("left out", "no part arrived for … s", 11, "no part arrived for 4.0 s"),
    ("left out", "the connection was lost", 33, "the connection was lost"),
)
PAUSED = ActivityStatus(state="paused", reasons=(Reason(kind="battery", text="on battery"),), since=START + 100.0)
STALLED = Alert(id="stalled-1", kind="stalled", text="No epoch has ended for 12 minutes.", since=START + 720.0)


def moment(epoch: int) -> Moment:
    row = epoch_row(epoch)
    return Moment(
        time=row.time, seconds=8.0, epoch=epoch, alive=row.peers + 2.0, trainers=float(row.peers),
        samples_per_second=row.samples / row.seconds, loss=row.loss,
    )  # fmt: skip


def evaluation(epoch: int) -> Evaluated:
    return Evaluated(epoch, loss_at(epoch) + 0.12, 512, {"accuracy": 0.75}, time=START + epoch * 8.0 + 2.0)


def loss_at(epoch: int) -> float:
    noise = random.Random(epoch).gauss(0, 0.035)
    return 1.62 + 3.9 * math.exp(-epoch / 22) + 0.5 * math.exp(-epoch / 140) + noise


def epoch_row(epoch: int) -> EpochAdvanced:
    wobble = random.Random(epoch + 7).uniform(-0.5, 0.9)
    rate = (340 if epoch < 60 else 517) + 12 * wobble
    seconds = TARGET / rate + 0.4
    return EpochAdvanced(
        epoch=epoch, lineage="ab" * 32, time=START + epoch * 8.0, loss=loss_at(epoch), samples=TARGET + epoch % 17,
        own_samples=int(100 * seconds), peers=3 if epoch < 60 else 4, seconds=seconds,
        averaging_seconds=0.34 + 0.05 * wobble, gradient_norm=1.2345, update_norm=0.0625,
    )  # fmt: skip


def round_row(number: int) -> RoundFinished:
    draw = random.Random(number * 31)
    attic, mac, garage, lab, relay = (peer.peer_id for peer in (*TRAINERS, OTHERS[0]))
    group = (attic, garage, lab, relay, mac)[: 4 if number < 60 else 5]
    failed = number % 23 == 7
    left = {garage: draw.choice(REASONS)} if number % 11 == 5 else {}
    return RoundFinished(
        id=number, time=START + number * 8.0 - 0.2, round_id="ab" * 32,
        purpose="stdlib-lm_state" if number % 9 == 3 else "stdlib-lm_grads", epoch=number - 1,
        outcome="failed" if failed else "committed",
        reason="lab-17 was killed while it reduced; nobody else holds its parts" if failed else "", leader=attic,
        members=group, contributors=tuple(peer for peer in group if peer != relay and peer not in left),
        left_out=left,
        seconds={"looking for group": 1.3, "awaiting trigger": 0.02, "running all-reduce": draw.uniform(0.28, 0.44)},
        bytes_sent=draw.randrange(38_000_000, 43_000_000), bytes_received=draw.randrange(38_000_000, 43_000_000),
    )  # fmt: skip


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


def volunteer(run: FakeRun, name: str = "lab-17") -> FakeRun:
    """The same run as a trainer shows it."""
    run.people = [replace(peer, me=peer.name == name) for peer in run.people]
    return run


def large_run(peers: int = 1000) -> FakeRun:
    """As a monitor shows it; a third cannot be dialed."""
    others = [
        peer_row(
            f"peer-{number:04d}",
            "auxiliary" if number % 40 == 1 else "trainer",
            client_mode=number % 3 == 0,
            samples_per_second=20.0 + number % 50,
        )
        for number in range(peers - 1)
    ]
    return FakeRun(finished_epochs=400, max_epochs=5000, people=[OTHERS[1], *others])


def as_shown(**written: object) -> dict[str, object]:
    """Limits as a peer tells them, of which these were written."""
    values = Limits.model_validate(written).model_dump()
    origin = "~/.config/swarm/config.limits.json"
    return {
        "limits": {
            key: {"value": value, "text": as_text(key, value), "from": origin if key in written else ""}
            for key, value in values.items()
        }
    }


@dataclass
class FakeControls:
    """What the page changes, told by the run as it would be by a peer; `asked` keeps every wish."""

    run: FakeRun
    asked: list[tuple[Any, ...]] = field(default_factory=list)

    @property
    def now(self) -> float:
        return time.time()  # as the routes count

    def activity(self) -> Mapping[str, Any]:
        return asdict(self.run.activity)

    def pause(self, until: float | None, seconds: float | None = None) -> None:
        self.asked.append(("pause", until))
        reason = Reason(kind="asked", text="by you", until=until)
        self.run.activity = ActivityStatus(state="paused", reasons=(reason,), since=self.now)

    def resume(self) -> None:
        self.asked.append(("resume",))
        self.run.activity = ActivityStatus()

    def stop(self, *, now: bool) -> None:
        self.asked.append(("stop", now))
        self.run.activity = ActivityStatus(state="stopping", keeps=1200, seconds_left=240.0)

    def end(self) -> None:
        self.asked.append(("end",))

    def limits(self) -> Mapping[str, Any]:
        return self.run.limits

    def change_limits(self, changes: Mapping[str, Any], *, keep: bool) -> None:
        try:
            shown: Any = self.run.limits["limits"]
            written = {key: limit["value"] for key, limit in shown.items() if limit["from"]}
            self.run.limits = as_shown(**(written | dict(changes)))
        except ValueError as error:
            raise RecipeError(str(error)) from error
        self.asked.append(("limits", dict(changes), keep))
