"""Whole roles in one process: a monitor that the recipe names measures, and the run ends where it learns no more."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from swarmcli.checkpoints.directory import loss_of
from swarmcli.checkpoints.layout import epoch_of
from swarmcli.events import Evaluated
from swarmcli.journal import JournalReader
from swarmcli.network.identity import Identity
from swarmcli.network.key_file import create_key_file, read_key_file
from swarmcli.optim.peers import directory
from swarmcli.peer import collaboration
from tests.peer.roles import PATIENCE, Peer, Sums

EVERY, LAST = 5, 20
END = f"the run ends after epoch {LAST}"
SETTINGS = (
    f"evaluation.every_epochs={EVERY}",
    "evaluation.held_out=0.1",
    "evaluation.early_stopping_patience=2",
    "evaluation.early_stopping_threshold=1e6",  # nothing is so much better
    f"checkpoint.every_epochs={EVERY}",
    "checkpoint.keep=10",
)


class KeptAside(Sums):
    """Whoever computes waits until `peers` are three, and until all of them know the last evaluation and where the run
    ends: here epochs take less time than that."""

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
                peer.until(lambda peer=peer: due in [0, *(event.epoch for event in measured(peer))])
                peer.until(lambda peer=peer: due < LAST - EVERY or any(END in text for text in peer.notices))
        return super().loss(model, batch)


def measured(peer: Peer) -> list[Evaluated]:
    return [event for event in peer.events if isinstance(event, Evaluated)]


@pytest.fixture(autouse=True)
def task(start: Any, monkeypatch: pytest.MonkeyPatch) -> KeptAside:
    task = KeptAside()
    monkeypatch.setattr(collaboration, "build_task", lambda recipe: task)
    monkeypatch.setattr(directory, "REFRESH_PERIOD", 0.05)
    return task


def test_the_evaluator_measures_and_ends_the_run_for_everybody(start: Any, task: KeptAside, tmp_path: Path) -> None:
    key = tmp_path / "monitor" / "identity.key"
    key.parent.mkdir()
    create_key_file(key)
    named = f"evaluation.evaluator={Identity(read_key_file(key, '', '')).peer_id}"
    settings = (*SETTINGS, named)
    monitor = start("monitor", role="monitor", settings=settings, leave_when_done=True)
    task.peers = peers = (monitor, *(start(name, monitor, settings=settings) for name in ("one", "other")))
    task.complete.set()
    for peer in peers:
        peer.end()
    assert {peer.epoch for peer in peers} == {LAST}
    told = {event.epoch: event for event in measured(monitor)}
    assert {5, 10, 15} <= told.keys() and not any(event.by for event in told.values())
    for peer in peers[1:]:
        heard = [event for event in measured(peer) if event.epoch < LAST]
        assert [(event.epoch, event.by) for event in heard] == [(epoch, "by monitor") for epoch in (5, 10, 15)]
        assert all(told[event.epoch].loss == event.loss for event in heard)
    assert monitor.notices[-1].endswith("; leaving"), "as it was told to"
    with JournalReader(peers[1].home / "journal.sqlite") as reader:
        assert [each.by for each in reader.evaluations("small") if each.epoch < LAST] == ["by monitor"] * 3
    for path in (monitor.home / "checkpoints").glob("epoch-*"):
        assert loss_of(path) == pytest.approx(told[epoch_of(path)].loss)
        assert f"- on data kept aside: `loss {loss_of(path):.4f}" in (path / "README.md").read_text()
        assert "run_id" in (path / "recipe.yaml").read_text()
    shutil.copytree(monitor.home / "checkpoints", peers[1].home / "checkpoints", dirs_exist_ok=True)
    for name in ("monitor", "one"):  # each by itself: nobody has to be there to say it again
        again = start(name, settings=settings)
        again.end()
        assert any("the run is finished, at its last epoch" in text for text in again.notices) and not again.epochs, (
            again.notices
        )
