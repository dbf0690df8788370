"""When the owner is alerted, and when not: runs that are played look by look, without a clock."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from swarmcli.events import EpochLoss, Event, Events, Noticed, RunObserved
from swarmcli.run.alerts import DESERTED, DONORLESS, STANDS, Alerts
from swarmcli.run.observer import Observer
from swarmcli.run.values import Alert, PeerStatus, RunStatus, State

STEP = 4.0
TRAINER = PeerStatus(peer_id="a", role="trainer", epoch=0)
MONITOR = PeerStatus(peer_id="m", role="monitor", epoch=0, me=True)
HELPER = PeerStatus(peer_id="h", role="auxiliary", epoch=0, me=True)


class Run:
    """Played for a while at a time; tells which alerts began and ended."""

    def __init__(self, *peers: PeerStatus) -> None:
        self.alerts = Alerts()
        self.told: list[str] = []
        self.begun: list[Alert] = []
        self.status = RunStatus(
            run_id="r", state="training", peer_id="m", role="monitor", epoch=1, samples=0, target=100,
            samples_per_second=10.0, peers=peers or (MONITOR, TRAINER),
        )  # fmt: skip

    def change(self, **changes: object) -> None:
        self.status = replace(self.status, **changes)  # type: ignore[arg-type]

    def play(self, seconds: float, step: float = STEP) -> None:
        for _ in range(int(seconds / step)):
            self.change(now=self.status.now + step)
            begun, ended = self.alerts.look(self.status)
            self.begun += begun
            self.told += [f"+{alert.kind}" for alert in begun] + [f"-{alert.kind}" for alert in ended]

    def epochs(self, *losses: float, seconds: float = 8.0) -> None:
        for loss in losses:
            self.play(seconds)
            self.change(epoch=self.status.epoch + 1, losses=(*self.status.losses, loss)[-60:])
        self.play(STEP)


def healthy(draw: random.Random, count: int) -> Iterator[float]:
    for epoch in range(count):
        yield 1.6 + 4.0 * math.exp(-epoch / 30) + draw.gauss(0, 0.08) + (0.6 if draw.random() < 0.02 else 0.0)


def test_nothing_is_said_of_a_healthy_run() -> None:
    """Trainers come, pause and go, epochs differ, a loss jumps now and then, this computer sleeps."""
    draw, run = random.Random(0), Run()
    for number, loss in enumerate(healthy(draw, 400)):
        health = draw.choice(["in step", "in step", "behind"])
        run.change(peers=(MONITOR, replace(TRAINER, health=health)), samples=draw.randrange(101))
        run.epochs(loss, seconds=draw.choice((8.0, 20.0, 60.0)))
        if number % 100 == 50:
            run.change(now=run.status.now + 8 * 3600.0)
    run.change(state="waiting", waits=DESERTION, overdue=DESERTED - STEP)
    run.play(STEP)
    run.change(state="finished", waits="", overdue=0.0)
    run.play(3 * DESERTED)
    assert run.told == []


DESERTION = "Nobody computes: epoch 4 has no trainer."


@pytest.mark.parametrize(("state", "seconds"), [("standing", STANDS), ("waiting", DESERTED)])
def test_a_run_that_does_not_go_on_is_told_once_in_the_words_of_the_screens_until_an_epoch_ends(
    state: State, seconds: float
) -> None:
    run = Run()
    run.epochs(*[2.0] * 3)
    run.change(state=state, waits=DESERTION, overdue=seconds - STEP)
    run.play(STEP)
    run.change(waits="", overdue=10 * seconds)  # a lone trainer whose user pauses it, or a run that has not begun
    run.play(STEP)
    assert run.told == []
    run.change(waits=DESERTION, overdue=seconds)
    run.play(10 * STEP)
    assert run.told == ["+stalled"] and run.begun[0].text == DESERTION
    run.change(state="training", waits="", overdue=0.0)
    run.play(DESERTED - 2 * STEP)
    assert [alert.kind for alert in run.alerts.standing] == ["stalled"], "that somebody computes is what it says"
    run.play(2 * STEP)
    assert run.told == ["+stalled", "-stalled"]
    run.change(state=state, waits=DESERTION, overdue=seconds)
    run.play(STEP)
    run.change(state="training", waits="", overdue=0.0)
    run.epochs(2.0)
    assert run.told == ["+stalled", "-stalled"] * 2 and run.alerts.standing == ()


def test_the_last_donor_that_is_lost_is_told_and_flicker_is_not() -> None:
    run = Run(HELPER, TRAINER)
    run.play(100.0)
    for _ in range(20):  # it comes and goes
        run.change(peers=(HELPER,))
        run.play(DONORLESS / 2)
        run.change(peers=(HELPER, TRAINER))
        run.play(STEP)
    assert run.told == []
    run.change(peers=(HELPER,))
    run.play(DONORLESS)
    assert run.told == ["+no donor"]
    run.change(peers=(HELPER, TRAINER))
    run.play(STEP)
    assert run.told == ["+no donor", "-no donor"]


def test_a_monitor_whose_trainers_have_left_holds_the_state_itself() -> None:
    run = Run()
    run.play(100.0)
    run.change(state="waiting", peers=(MONITOR, replace(TRAINER, health="left")), samples_per_second=0.0)
    run.play(2 * DONORLESS)
    assert run.told == []
    run.change(state="synchronizing")  # until it is back in step, nobody does
    run.play(DONORLESS)
    assert run.told[-1] == "+no donor"


def test_a_loss_that_rises_and_stays_is_told_and_one_that_comes_back_ends_it() -> None:
    draw, run = random.Random(1), Run()
    run.epochs(*healthy(draw, 100))
    run.epochs(*[6.0] * 5, 1.8, 1.7, 1.9, 1.7, 1.8, 1.7)  # for a moment only
    assert run.told == []
    run.epochs(*[6.0] * 12)
    assert run.told == ["+diverged"] and "has risen" in run.begun[0].text
    run.epochs(3.2, 4.5, 3.2, 4.5)  # between both bounds nothing changes
    assert run.told == ["+diverged"]
    run.epochs(*[1.7] * 12)
    assert run.told == ["+diverged", "-diverged"]


def test_a_loss_that_is_no_number_is_told_after_a_few_epochs() -> None:
    run = Run()
    run.epochs(*[2.0] * 10, math.nan, 2.0, 2.0)
    assert run.told == []
    run.epochs(math.nan, math.inf, math.nan, math.nan)
    assert run.told == ["+diverged"] and "no number" in run.begun[0].text


def test_an_observer_tells_the_journal_people_and_pages() -> None:
    heard: list[Event] = []
    events, run = Events(), Run()
    events.subscribe(heard.append)
    news = [[EpochLoss(7, 2.0, 3)]]
    alerts = Alerts()
    observer = Observer(lambda: run.status, events, alerts, news=lambda: news.pop() if news else [])
    run.change(losses=(3.0, 2.0))
    for peers, overdue in (((MONITOR, TRAINER), 0.0), ((MONITOR,), DESERTED)):
        waits = DESERTION if overdue else ""
        run.change(now=run.status.now + STEP, peers=peers, epoch=7, state="waiting", overdue=overdue, waits=waits)
        observer.observe()
    assert [alert.kind for alert in alerts.standing] == ["stalled"]
    run.change(peers=(MONITOR, TRAINER), epoch=8, overdue=0.0, waits="", now=run.status.now + STEP)
    observer.observe()
    assert alerts.standing == ()
    observed = [event for event in heard if isinstance(event, RunObserved)]
    assert observed[0] == RunObserved(7, 2, 1, 10.0, 2.0) and observed[1].trainers == 0
    assert [event.level for event in heard if isinstance(event, Noticed)] == ["warning", "info"]
    news.append([EpochLoss(7, 2.5, 4)])
    with observer:
        pass
    assert [event for event in heard if isinstance(event, EpochLoss)] == [EpochLoss(7, 2.0, 3), EpochLoss(7, 2.5, 4)]
