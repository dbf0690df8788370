"""Whole roles in one process: three measure one state, and the run ends where it learns no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swarmcli.checkpoints.layout import epoch_of
from swarmcli.checkpoints.shelf import loss_of
from swarmcli.events import Evaluated
from swarmcli.journal import JournalReader
from swarmcli.optim.peers import directory
from swarmcli.peer import collaboration
from tests.peer.roles import Sums

EVERY = 5
SETTINGS = (
    f"evaluation.every_epochs={EVERY}",
    "evaluation.held_out=0.1",
    "evaluation.early_stopping_patience=2",
    "evaluation.early_stopping_threshold=1e6",  # nothing is so much better
    f"checkpoint.every_epochs={EVERY}",
    "checkpoint.keep=10",
)


class KeptAside(Sums):
    def evaluation_batches(self) -> list[dict[str, torch.Tensor]]:
        return [{"features": torch.ones(4, 8)}]


@pytest.fixture(autouse=True)
def task(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collaboration, "build_task", lambda recipe: KeptAside())
    monkeypatch.setattr(directory, "REFRESH_PERIOD", 0.05)  # epochs are short here


def test_three_measure_the_same_state_and_the_run_ends_for_everybody(start: Any) -> None:
    monitor = start("monitor", role="monitor", settings=SETTINGS, leave_when_done=True)
    peers = [monitor, *(start(name, monitor, settings=SETTINGS) for name in ("one", "other"))]
    for peer in peers:
        peer.end()
    ends = {peer.epoch for peer in peers}
    # On a busy machine the next epoch may have begun before the evaluation that ends the run was counted.
    assert len(ends) == 1 and ends.pop() % EVERY <= 1
    counted = [event for event in monitor.events if isinstance(event, Evaluated) and event.peers > 1]
    assert counted and all(event.lineage for event in counted)
    measured = {
        (event.epoch, event.lineage): set[float]()
        for peer in peers
        for event in peer.events
        if isinstance(event, Evaluated)
    }
    for peer in peers:
        for event in peer.events:
            if isinstance(event, Evaluated) and event.epoch % EVERY == 0:
                measured[event.epoch, event.lineage].add(round(event.loss, 5))
    assert all(len(losses) <= 1 for losses in measured.values()), "everybody has measured the same"
    assert any("the run ends behind epoch" in text for text in monitor.notices)
    assert monitor.notices[-1].endswith("; leaving"), "as it was told to"
    with JournalReader(monitor.home / "journal.sqlite") as reader:
        kept = {each.epoch: each for each in reader.evaluations("small")}
    assert all(kept[event.epoch].peers == event.peers for event in counted), "what counts comes last, and stays"
    for path in (monitor.home / "checkpoints").glob("epoch-*"):
        assert epoch_of(path) not in kept or loss_of(path) == pytest.approx(kept[epoch_of(path)].loss)
        assert f"- on data kept aside: `loss {loss_of(path):.4f}" in (path / "README.md").read_text()
        assert "run_id" in (path / "recipe.yaml").read_text()
    again = start("monitor", settings=SETTINGS)  # where the checkpoints are
    again.end()
    assert any("has reached its last epoch" in text for text in again.notices) and not again.epochs, again.notices
