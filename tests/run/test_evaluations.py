"""Evaluations that count for a run, and the end of it: several peers that read each other's reports."""

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

PEERS = [Identity.from_seed(seed).peer_id for seed in range(1, 7)]


def lineage_of(epoch: int) -> str:
    return f"{epoch:064x}"


@dataclass
class Said:
    """The part of a peer's report that matters here."""

    epoch: int = 0
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

    def __post_init__(self) -> None:
        self.reports = {peer: Said() for peer in self.peers}
        self.heard: dict[PeerID, list[Event]] = {peer: [] for peer in self.peers}
        self.views = {peer: self.view(peer) for peer in self.peers}

    def view(self, peer: PeerID, earlier: Sequence[Evaluated] = (), mates: Sequence[PeerID] | None = None) -> Any:
        known = set(self.peers) - self.strangers - {peer} if mates is None else set(mates)
        return RunEvaluations(
            EvaluationSettings(**({"every_epochs": 5} | self.settings)), peer, lambda: cast(Any, dict(self.reports)),
            lambda: known, lambda other: other not in self.silent, self.heard[peer].append, earlier,
        )  # fmt: skip

    def come_to(self, epoch: int) -> None:
        for report in self.reports.values():
            report.epoch = epoch

    def tell(self, peer: PeerID, epoch: int, loss: float, lineage: str = "", **metrics: float) -> None:
        told = ReportedEvaluation(
            epoch=epoch, loss=loss, samples=8, metrics=metrics, lineage=lineage or lineage_of(epoch)
        )
        self.reports[peer].evaluation = told

    def look(self) -> None:
        for peer, view in self.views.items():
            view.look()
            self.reports[peer].ends = view.opinion

    def appointed(self, epoch: int) -> list[PeerID]:
        return [peer for peer, view in self.views.items() if view.is_appointed(lineage_of(epoch))]

    def evaluate(self, epoch: int, loss: float) -> None:
        """Those who are appointed measure the same."""
        self.come_to(epoch)
        for peer in self.appointed(epoch):
            self.tell(peer, epoch, loss)
        self.look()

    def counted(self, peer: PeerID) -> list[tuple[int, float, int]]:
        found = [event for event in self.heard[peer] if isinstance(event, Evaluated)]
        return [(each.epoch, each.loss, each.peers) for each in found]


@pytest.mark.parametrize(("present", "asked"), [(1, 1), (2, 2), (3, 3), (6, 3)])
def test_three_are_asked_or_all_where_there_are_fewer(present: int, asked: int) -> None:
    swarm = Swarm(PEERS[:present])
    swarm.evaluate(5, 0.5)
    assert len(swarm.appointed(5)) == asked
    assert all(swarm.counted(peer) == [(5, 0.5, asked)] for peer in swarm.peers)
    drawn = {peer for epoch in range(5, 100, 5) for peer in swarm.appointed(epoch)}
    assert drawn == set(swarm.peers), "other lineages draw others"
    never = Swarm(PEERS[:present], {"every_epochs": 0})
    never.tell(PEERS[0], 0, 0.5)
    never.look()
    assert never.heard[PEERS[0]] == [] and never.views[PEERS[0]].best is None


def test_the_middle_counts_number_by_number_with_what_most_have_measured() -> None:
    swarm = Swarm(PEERS[:3])
    swarm.come_to(5)
    for peer, loss, more in zip(
        PEERS, (0.1, 7.0, 0.3), ({"f1": 0.1}, {"f1": 0.9}, {"f1": 0.4, "lie": 1.0}), strict=False
    ):
        swarm.tell(peer, 5, loss, **more)
    swarm.look()
    assert swarm.heard[PEERS[0]] == [Evaluated(5, 0.3, 8, {"f1": 0.4}, lineage_of(5), 3)]
    swarm.tell(PEERS[0], 5, 99.0)
    swarm.look()
    assert len(swarm.counted(PEERS[0])) == 1, "it does not move any more"


def test_nothing_counts_before_all_who_were_asked_have_told_or_the_next_was_measured() -> None:
    swarm = Swarm(PEERS[:3])
    swarm.come_to(5)
    for peer in PEERS[:2]:
        swarm.tell(peer, 5, 0.5)
    swarm.look()
    assert swarm.counted(PEERS[0]) == []
    swarm.come_to(10)
    swarm.tell(PEERS[2], 10, 0.4)
    swarm.look()
    assert swarm.counted(PEERS[0]) == [(5, 0.5, 2)]
    swarm.evaluate(15, 0.3)
    assert swarm.counted(PEERS[0])[1:] == [(15, 0.3, 3)], "a lone word where others could have told counts nothing"


@pytest.mark.parametrize("gone", ["silent", "paused", "assisting", "joining"])
def test_nobody_waits_for_one_that_cannot_measure(gone: str) -> None:
    swarm = Swarm(PEERS[:3])
    if gone == "silent":
        swarm.silent.add(PEERS[2])
    elif gone == "paused":
        swarm.reports[PEERS[2]].pause = gone
    else:
        swarm.reports[PEERS[2]].phase = gone
    swarm.come_to(5)
    for peer in PEERS[:2]:
        swarm.tell(peer, 5, 0.5)
    swarm.views[PEERS[0]].look()
    assert swarm.counted(PEERS[0]) == [(5, 0.5, 2)]


def test_what_the_last_evaluator_told_before_it_left_counts_nothing_for_a_peer_that_cannot_measure() -> None:
    swarm = Swarm(PEERS[:2])
    swarm.reports[PEERS[0]].phase = "assisting"
    swarm.come_to(5)
    swarm.tell(PEERS[1], 5, 0.5)
    swarm.silent.add(PEERS[1])
    swarm.views[PEERS[0]].look()
    assert swarm.counted(PEERS[0]) == []


def test_strangers_have_no_say_and_are_not_asked() -> None:
    swarm = Swarm(PEERS, strangers=set(PEERS[3:]))
    swarm.come_to(5)
    for stranger in PEERS[3:]:
        swarm.tell(stranger, 5, 0.001)
    for peer in PEERS[:3]:
        assert swarm.views[peer].is_appointed(lineage_of(5))
        swarm.tell(peer, 5, 0.5)
    swarm.views[PEERS[0]].look()
    assert swarm.counted(PEERS[0]) == [(5, 0.5, 3)]


def test_what_is_told_of_epochs_to_come_or_another_state_or_between_them_counts_nothing() -> None:
    swarm = Swarm(PEERS[:4])
    swarm.come_to(6)
    swarm.tell(PEERS[0], 500, 0.1)
    swarm.tell(PEERS[1], 6, 0.1)
    for peer in PEERS[2:4]:
        swarm.tell(peer, 5, 0.5)
    swarm.look()
    swarm.tell(PEERS[0], 5, 0.1, lineage="f" * 64)
    swarm.tell(PEERS[1], 5, 0.6)
    swarm.look()
    assert swarm.counted(PEERS[2]) == [(5, 0.5, 3)]


def test_one_that_the_recipe_names_measures_alone_while_it_is_there() -> None:
    named = PEERS[5]
    swarm = Swarm(PEERS, {"evaluator": named.text}, strangers={named})
    swarm.evaluate(5, 0.5)
    assert swarm.appointed(5) == [named]
    assert all(swarm.counted(peer) == [(5, 0.5, 1)] for peer in PEERS)
    swarm.silent.add(named)
    swarm.reports[named].phase = "joining"
    swarm.evaluate(10, 0.4)
    assert swarm.counted(PEERS[0])[1:] == [(10, 0.4, 3)]


def test_a_run_that_gets_no_better_ends_at_the_next_evaluation_for_everybody() -> None:
    swarm = Swarm(PEERS[:4], {"early_stopping_patience": 2})
    for epoch, loss in ((5, 0.5), (10, 0.3), (15, 0.4), (20, 0.29), (25, 0.3)):
        swarm.evaluate(epoch, loss)
    assert {view.ends_at for view in swarm.views.values()} == {None}
    swarm.evaluate(30, 0.29)
    swarm.look()
    assert {view.ends_at for view in swarm.views.values()} == {35}
    told = [event.text for event in swarm.heard[PEERS[0]] if isinstance(event, Noticed)]
    assert told == ["the run ends behind epoch 35: it got no better (evaluations: 2)"]
    alone = Swarm(PEERS[:1], {"early_stopping_patience": 2, "early_stopping_threshold": 0.1})
    for epoch, loss in ((5, 0.5), (10, 0.45), (15, 0.41)):  # better by less than that is no better
        alone.evaluate(epoch, loss)
    assert alone.views[PEERS[0]].ends_at == 20
    slow = Swarm(PEERS[:1], {"early_stopping_patience": 1})
    slow.evaluate(5, 0.5)
    slow.tell(PEERS[0], 10, 0.5)
    slow.come_to(17)  # epochs take less time than an evaluation
    slow.look()
    assert slow.views[PEERS[0]].ends_at == 20, "where nobody is yet"


def test_one_that_says_so_alone_ends_nothing_and_one_that_says_otherwise_keeps_nobody() -> None:
    swarm = Swarm(PEERS[:4], {"early_stopping_patience": 1})
    for liar in range(2):
        swarm.reports[PEERS[0]].ends = 11
        swarm.views[PEERS[1]].look()
        assert swarm.views[PEERS[1]].ends_at is None, "nobody else says anything, or all others say otherwise"
        for epoch, loss in ((5, 0.5 - liar / 10), (10, 0.4 - liar / 10)):
            swarm.evaluate(epoch, loss)
    swarm.views[PEERS[0]] = swarm.view(PEERS[0])  # it has missed what was before
    swarm.evaluate(15, 0.4)
    swarm.look()
    assert {view.ends_at for view in swarm.views.values()} == {20}
    newcomer = swarm.view(PEERS[0], mates=())
    newcomer.look()
    assert newcomer.ends_at == 20, "it goes by those who are there"


@pytest.mark.parametrize(
    ("opinions", "last"),
    [((20, 25), 25), ((20, 25, 30), 25), ((20, 20, 25, 30), 25), ((20, 20, 20, 30), 20), ((20, 25, 0, 0), None)],
    ids=str,
)
def test_peers_that_have_missed_evaluations_end_where_most_take_the_run_to_have_ended(
    opinions: tuple[int, ...], last: int | None
) -> None:
    swarm = Swarm(PEERS[: len(opinions)], {"early_stopping_patience": 2})
    for peer, opinion in zip(swarm.peers, opinions, strict=True):
        swarm.views[peer].opinion = swarm.reports[peer].ends = opinion
    swarm.look()
    assert {view.ends_at for view in swarm.views.values()} == {last}


def test_what_counted_before_is_remembered_as_far_as_this_peer_has_come() -> None:
    earlier = [Evaluated(epoch, 0.5, 8, {}, lineage_of(epoch), 3) for epoch in (5, 10, 15)]
    own = Evaluated(12, 0.1, 8, {}, lineage_of(12))  # nobody else has measured that
    swarm = Swarm(PEERS[:1], {"early_stopping_patience": 2})
    back = swarm.view(PEERS[0], [*earlier, own])
    swarm.reports[PEERS[0]].phase = "joining"
    back.look()
    assert back.best is None, "it does not know yet where it stands"
    swarm.reports[PEERS[0]] = Said(16)
    back.look()
    assert back.ends_at == 20 and back.best == earlier[0]
    anew = swarm.view(PEERS[0], earlier)
    swarm.reports[PEERS[0]] = Said(7)
    anew.look()
    assert anew.ends_at is None and anew.last == earlier[0]
