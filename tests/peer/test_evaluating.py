"""Whole roles in one process: three measure one state, and the run ends where it learns no more."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from swarmcli.checkpoints.layout import epoch_of
from swarmcli.checkpoints.shelf import loss_of
from swarmcli.events import Evaluated
from swarmcli.journal import JournalReader
from swarmcli.optim.peers import directory
from swarmcli.peer import collaboration
from tests.peer.roles import PATIENCE, Peer, Sums

EVERY, LAST = 5, 20
END = f"the run ends behind epoch {LAST}"
SETTINGS = (
    f"evaluation.every_epochs={EVERY}",
    "evaluation.held_out=0.1",
    "evaluation.early_stopping_patience=2",
    "evaluation.early_stopping_threshold=1e6",  # nothing is so much better
    f"checkpoint.every_epochs={EVERY}",
    "checkpoint.keep=10",
)


class KeptAside(Sums):
    """Whoever computes waits until `peers` are three, and until all of them know what counts of the last evaluation and
    where the run ends: here epochs take less time than that."""

    peers: tuple[Peer, ...] = ()

    def __init__(self) -> None:
        self.complete = threading.Event()

    def evaluation_batches(self) -> list[dict[str, torch.Tensor]]:
        return [{"features": torch.ones(4, 8)}]

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if torch.is_grad_enabled():
            assert self.complete.wait(PATIENCE)
            due = min(max((peer.epoch for peer in self.peers), default=0) // EVERY * EVERY, LAST - EVERY)
            for peer in self.peers:
                peer.until(lambda peer=peer: due in [0, *(event.epoch for event in counted(peer))])
                peer.until(lambda peer=peer: due < LAST - EVERY or any(END in text for text in peer.notices))
        return super().loss(model, batch)


def counted(peer: Peer) -> list[Evaluated]:
    return [event for event in peer.events if isinstance(event, Evaluated) and event.peers > 1]


@pytest.fixture(autouse=True)
def task(start: Any, monkeypatch: pytest.MonkeyPatch) -> KeptAside:
    task = KeptAside()
    monkeypatch.setattr(collaboration, "build_task", lambda recipe: task)
    monkeypatch.setattr(directory, "REFRESH_PERIOD", 0.05)
    return task


def test_three_measure_the_same_state_and_the_run_ends_for_everybody(start: Any, task: KeptAside) -> None:
    monitor = start("monitor", role="monitor", settings=SETTINGS, leave_when_done=True)
    task.peers = peers = (monitor, *(start(name, monitor, settings=SETTINGS) for name in ("one", "other")))
    task.complete.set()
    for peer in peers:
        peer.end()
    assert {peer.epoch for peer in peers} == {LAST}
    agreed = counted(monitor)
    assert [event.epoch for event in agreed][:3] == [5, 10, 15] and all(event.lineage for event in agreed)
    measured: dict[tuple[int, str], set[float]] = {}
    for event in (event for peer in peers for event in peer.events):
        if isinstance(event, Evaluated):
            measured.setdefault((event.epoch, event.lineage), set()).add(round(event.loss, 5))
    assert all(len(losses) == 1 for losses in measured.values()), "everybody has measured the same"
    assert monitor.notices[-1].endswith("; leaving"), "as it was told to"
    with JournalReader(monitor.home / "journal.sqlite") as reader:
        kept = {each.epoch: each for each in reader.evaluations("small")}
    assert all(kept[event.epoch].peers == event.peers for event in agreed), "what counts comes last, and stays"
    for path in (monitor.home / "checkpoints").glob("epoch-*"):
        assert epoch_of(path) not in kept or loss_of(path) == pytest.approx(kept[epoch_of(path)].loss)
        assert f"- on data kept aside: `loss {loss_of(path):.4f}" in (path / "README.md").read_text()
        assert "run_id" in (path / "recipe.yaml").read_text()
    again = start("monitor", settings=SETTINGS)  # where the checkpoints are
    again.end()
    assert any("has reached its last epoch" in text for text in again.notices) and not again.epochs, again.notices
