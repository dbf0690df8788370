from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmcli.events import Events, PeerSeen
from swarmcli.journal import ReportRecord
from swarmcli.network.identity import Identity
from swarmcli.optim.membership.report import ReportedLoss
from swarmcli.roles.watch import RunWatch, mode_in_words
from tests.recipe.recipes import small

TRAINER = Identity.from_seed(1).peer_id


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "synchronous"),
        (["local.site.processes=4"], "synchronous, a site of 4"),
        (["gradient_averaging={method: powersgd, rank: 8}"], "PowerSGD of rank 8"),
        (["delay.grad_averaging=yes"], "delayed averaging"),
        (
            ["delay.optimizer_step=yes", "compression.gradients=blockwise_8bit"],
            "delayed step, blockwise 8bit on the wire",
        ),
        (["local_updates.enabled=yes", "compression.state_averaging=float16"], "local updates, float16 on the wire"),
    ],
)
def test_people_read_how_a_run_averages(overrides: list[str], words: str) -> None:
    assert mode_in_words(small(*overrides)) == words


def report(*epochs: int, role: str = "trainer") -> SimpleNamespace:
    recent = [ReportedLoss(epoch=epoch, loss=epoch / 10, samples=100 * epoch) for epoch in epochs]
    return SimpleNamespace(role=role, recent=recent, samples_per_second=5.0, last_outcome="committed", last_reason="")


def seen() -> PeerSeen:
    return PeerSeen(TRAINER.text, "Ada", "trainer", 0, 0, 0.0, False)


def recorded(*reports: SimpleNamespace) -> list[ReportRecord]:
    """What the journal gets when these reports of one peer are read, one after the other."""
    rows: list[ReportRecord] = []
    events = Events()
    peer = SimpleNamespace(events=events, journal=SimpleNamespace(report=rows.append))
    current: Sequence[Any] = [None]
    watch = RunWatch(cast(Any, peer))
    watch.follow(cast(Any, SimpleNamespace(peers=lambda: {TRAINER: current[0]})))
    for each in reports:
        current = [each]
        events.emit(seen())
    watch.close()
    events.emit(seen())
    return rows


def test_every_epoch_is_recorded_once_though_reports_are_read_seldom() -> None:
    rows = recorded(report(1, 2), report(1, 2), report(2, 3, 4, 5))
    assert [(row.epoch, row.loss, row.samples) for row in rows] == [(n, n / 10, 100 * n) for n in range(1, 6)]


def test_only_trainers_have_losses() -> None:
    assert recorded(report(1, role="monitor")) == []
