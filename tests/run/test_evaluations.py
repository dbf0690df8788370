"""Evaluations of a run, and the end of it: several peers that read each other's reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from swarmcli.events import Evaluated, Event, Noticed
from swarmcli.network.identity import Identity, PeerID
from swarmcli.optim.peers.report import ReportedEvaluation
from swarmcli.recipe.settings import EvaluationSettings
from swarmcli.run.evaluations import RunEvaluations

PEERS = sorted(Identity.from_seed(seed).peer_id for seed in range(1, 7))
NAMED = PEERS[3]


@dataclass
class Said:
    """The part of a peer's report that matters here."""

    epoch: int = 0
    name: str = ""
    role: str = "trainer"
    evaluation: ReportedEvaluation | None = None
    ends: int | None = None
    phase: str = "training"
    pause: str = ""

    @property
    def holds_state(self) -> bool:
        return self.phase != "assisting"


@dataclass
class Swarm:
    """Everybody has been in rounds with everybody, but with strangers."""

    peers: Sequence[PeerID]
    settings: dict[str, Any] = field(default_factory=dict)
    strangers: set[PeerID] = field(default_factory=set)
    silent: set[PeerID] = field(default_factory=set)
    kept: dict[PeerID, int] = field(default_factory=dict)  # behind which epoch the run ends, for the next start

    def __post_init__(self) -> None:
        self.reports = {peer: Said() for peer in self.peers}
        self.heard: dict[PeerID, list[Event]] = {peer: [] for peer in self.peers}
        self.views = {peer: self.view(peer) for peer in self.peers}

    def view(self, peer: PeerID, earlier: Sequence[Evaluated] = (), ended: int | None = None) -> RunEvaluations:
        known = set(self.peers) - self.strangers - {peer}
        settings = {
            "every_epochs": 5,
            **({"evaluator": NAMED.text} if "early_stopping_patience" in self.settings else {}),
        }
        return RunEvaluations(
            EvaluationSettings(**(settings | self.settings)), peer, lambda: cast(Any, dict(self.reports)),
            lambda: known, lambda other: other not in self.silent, self.heard[peer].append,
            lambda epoch: setattr(self.reports[peer], "ends", epoch),
            lambda epoch: self.kept.__setitem__(peer, epoch), earlier, ended,
        )  # fmt: skip

    def come_to(self, epoch: int) -> None:
        for report in self.reports.values():
            report.epoch = epoch

    def measure(self, peer: PeerID, epoch: int, loss: float) -> None:
        self.views[peer].note(Evaluated(epoch, loss, 8))
        self.reports[peer].evaluation = ReportedEvaluation(epoch=epoch, loss=loss, samples=8)

    def look(self) -> None:
        for view in self.views.values():
            view.look()

    def appointed(self) -> list[PeerID]:
        return [peer for peer, view in self.views.items() if view.is_appointed()]

    def shown(self, peer: PeerID) -> list[tuple[int, float, str]]:
        return [(each.epoch, each.loss, each.by) for each in self.heard[peer] if isinstance(each, Evaluated)]

    def ends(self) -> set[int | None]:
        return {view.ends_at for view in self.views.values()}


def test_one_measures_a_monitor_before_a_trainer_and_nobody_waits_for_one_that_cannot() -> None:
    swarm = Swarm(PEERS, strangers={PEERS[0]})
    assert swarm.appointed() == [PEERS[0], PEERS[1]], "to itself a stranger is none"
    swarm.reports[PEERS[4]].role = "monitor"
    assert swarm.appointed() == [PEERS[4]]
    for gone in ({"phase": "joining"}, {"phase": "assisting"}, {"pause": "paused"}):
        swarm.reports[PEERS[4]] = Said(role="monitor", **gone)
        assert swarm.appointed()[1:] == [PEERS[1]], gone


def test_one_that_the_recipe_names_measures_alone_while_it_is_there() -> None:
    swarm = Swarm(PEERS, {"evaluator": NAMED.text}, strangers={NAMED})
    assert swarm.appointed() == [NAMED]
    swarm.silent.add(NAMED)
    assert swarm.appointed() == [PEERS[0], NAMED], "it hears itself"


def test_what_others_have_measured_is_shown_with_their_name_once() -> None:
    swarm = Swarm(PEERS[:3], strangers={PEERS[2]})
    swarm.reports[PEERS[1]].name = "Ada"
    swarm.come_to(5)
    for peer, epoch in ((PEERS[1], 5), (PEERS[2], 4)):
        swarm.measure(peer, epoch, 0.5)
    swarm.look()
    swarm.look()
    assert swarm.shown(PEERS[0]) == [(5, 0.5, "by Ada")], "strangers are not heard"
    assert swarm.shown(PEERS[1]) == [(5, 0.5, "")]
    assert swarm.views[PEERS[0]].best is None, "it decides nothing"
    swarm.measure(PEERS[1], 10, 0.1)
    swarm.look()
    assert len(swarm.shown(PEERS[0])) == 1, "nobody has measured epochs to come"
    swarm.come_to(10)
    swarm.measure(PEERS[0], 10, 0.4)
    swarm.look()
    assert swarm.shown(PEERS[0])[1:] == [(10, 0.4, "")], "what this peer has measured itself stands"
    best = swarm.views[PEERS[0]].best
    assert best is not None and best.loss == 0.4


def test_the_evaluators_figures_are_the_runs_whoever_else_has_measured() -> None:
    swarm = Swarm(PEERS, {"evaluator": NAMED.text})
    swarm.come_to(5)
    swarm.measure(PEERS[0], 5, 0.1)
    swarm.look()
    swarm.measure(NAMED, 5, 0.5)
    swarm.look()
    assert swarm.shown(PEERS[1])[-1] == (5, 0.5, f"by {NAMED.short}")
    assert {view.best and view.best.loss for view in swarm.views.values()} == {0.5}


@pytest.mark.parametrize("threshold", [0.0, 0.1])
def test_a_run_that_gets_no_better_ends_at_the_next_evaluation_for_everybody(threshold: float) -> None:
    swarm = Swarm(PEERS[:4], {"early_stopping_patience": 2, "early_stopping_threshold": threshold})
    for epoch, loss in ((5, 0.5), (10, 0.45), (15, 0.46), (18, 0.9), (20, 0.41), (25, 0.43)):
        swarm.come_to(epoch)
        swarm.measure(NAMED, epoch, loss)
        swarm.look()
    assert swarm.ends() == ({None} if not threshold else {20}), "better by less than that is no better"
    swarm.come_to(32)  # epochs take less time than an evaluation
    swarm.measure(NAMED, 30, 0.42)
    swarm.look()
    assert swarm.ends() == ({35} if not threshold else {20}), "where nobody is yet"
    assert [report.ends for peer, report in swarm.reports.items() if peer != NAMED] == [None] * 3
    told = [event.text for event in swarm.heard[PEERS[0]] if isinstance(event, Noticed)]
    assert told == [f"the run ends after epoch {20 if threshold else 35}: the last 2 evaluations found no improvement"]


def test_nobody_but_the_evaluator_ends_a_run() -> None:
    swarm = Swarm(PEERS, {"early_stopping_patience": 1})
    for liar in PEERS:
        if liar != NAMED:
            swarm.reports[liar].ends = 7
    for epoch in (5, 10, 15):
        swarm.come_to(epoch)
        for liar in PEERS:
            if liar != NAMED:
                swarm.measure(liar, epoch, 9.0 + epoch)
                swarm.reports[liar].ends = 7
        swarm.look()
    assert swarm.ends() == {None}
    swarm.reports[NAMED].ends = 20
    swarm.look()
    assert {view.ends_at for peer, view in swarm.views.items() if peer != NAMED} == {20}


def test_what_was_measured_before_is_remembered_as_far_as_this_peer_has_come() -> None:
    earlier = [Evaluated(epoch, 0.5, 8, {}, NAMED.text, "Ada") for epoch in (5, 10, 15)]
    own = Evaluated(12, 0.1, 8)  # counts for nothing
    swarm = Swarm(PEERS[:1], {"early_stopping_patience": 2})
    back = swarm.view(PEERS[0], sorted([*earlier, own], key=lambda each: each.epoch))
    swarm.reports[PEERS[0]].phase = "joining"
    back.look()
    assert back.best is None, "it does not know yet where it stands"
    swarm.reports[PEERS[0]] = Said(7)
    back.look()
    assert back.best == earlier[0]
    named = Swarm([NAMED], {"early_stopping_patience": 2})
    named.reports[NAMED].epoch = 16
    named.view(NAMED, [Evaluated(epoch, 0.5, 8) for epoch in (5, 10, 15)]).look()
    assert named.reports[NAMED].ends == 20, "it says so again"
    never = Swarm(PEERS[:1], {"every_epochs": 0})
    never.look()
    assert never.heard[PEERS[0]] == [] and never.views[PEERS[0]].best is None


def test_who_has_slept_through_the_best_evaluation_does_not_end_the_run_by_the_others() -> None:
    swarm = Swarm([PEERS[0], NAMED], {"early_stopping_patience": 2})
    swarm.come_to(21)
    rows = [Evaluated(epoch, loss, 8, {}, NAMED.text, "Ada") for epoch, loss in ((5, 0.5), (15, 0.52), (20, 0.51))]
    back = swarm.view(PEERS[0], rows)  # 10 was told while it slept, and was better
    back.look()
    assert back.ends_at is None and back.best == rows[0]


def test_who_returns_when_the_evaluator_is_gone_ends_where_that_has_said() -> None:
    swarm = Swarm(PEERS[:4], {"early_stopping_patience": 2})
    swarm.come_to(16)
    swarm.reports[NAMED].ends = 20
    swarm.look()
    assert swarm.kept == dict.fromkeys(PEERS[:3], 20)
    alone = Swarm(PEERS[:1], {"early_stopping_patience": 2})
    back = alone.view(PEERS[0], ended=swarm.kept[PEERS[0]])
    for epoch, ends in ((7, None), (16, 20)):
        alone.come_to(epoch)
        back.look()
        assert back.ends_at == ends, "a run that was set back is not over"


def test_of_an_epoch_that_is_measured_twice_the_last_figure_counts_and_once() -> None:
    swarm = Swarm([NAMED], {"early_stopping_patience": 1})
    back = swarm.view(NAMED, [Evaluated(5, 0.5, 8), Evaluated(10, 0.4, 8)])  # and then the run was set back
    for epoch, loss in ((5, 0.3), (5, 0.3), (10, 0.29)):
        swarm.come_to(epoch)
        back.note(Evaluated(epoch, loss, 8))
        back.look()
        assert back.ends_at is None
    swarm.come_to(15)
    back.note(Evaluated(15, 0.3, 8))
    assert back.ends_at == 20 and back.best == Evaluated(10, 0.29, 8)
