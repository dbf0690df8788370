"""Whole roles in one process: the average of the weights over epochs (`ema_decay`) is part of what peers share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from swarmcli.checkpoints.layout import MODEL, averaged_file
from swarmcli.training import load_checkpoint
from swarmcli.training.resumed import Resume
from swarmcli.training.schedule import AVERAGE
from tests.peer.roles import Peer

SETTINGS = ("ema_decay=0.9", "optimizer.learning_rate=0.05")
NONE_YET = "holds no averaged weights: the average begins behind its next epoch"


def saved_by(peer: Peer) -> Path:
    return Path(peer.peer.saved.rpartition(" at ")[2])


def averages(place: Path) -> list[torch.Tensor]:
    """The file of them holds what the optimizer's state does, under the names of the weights."""
    found = [each[AVERAGE] for _, each in sorted(load_checkpoint(place).optimizer["state"].items())]
    file, weights = load_file(place / averaged_file(MODEL)), load_file(place / MODEL)
    assert file.keys() == weights.keys() and not any(torch.equal(file[name], weights[name]) for name in file)
    assert torch.equal(file["weight"], found[0]) and torch.equal(file["bias"], found[1])
    return found


def test_all_end_with_one_average_and_who_came_late_has_downloaded_it(start: Any) -> None:
    first = start("first", role="monitor", settings=SETTINGS)
    trainer = start("trainer", first, settings=SETTINGS)
    first.reach(3)
    late = start("late", first, role="monitor", settings=SETTINGS)
    late.reach(4)
    trainer.reach(late.epoch + 2)
    trainer.leave()
    for monitor in (first, late):
        monitor.reach(trainer.epoch)
        monitor.leave()
    assert late.epochs[0].epoch > 3
    mine, theirs = averages(saved_by(first)), averages(saved_by(late))
    assert all(torch.equal(each, other) for each, other in zip(mine, theirs, strict=True))


def test_it_begins_where_a_checkpoint_has_none_goes_on_where_it_has_and_ends_with_the_key(start: Any) -> None:
    def from_there(name: str, place: Path | None, *settings: str) -> tuple[Peer, Path]:
        peer = start(name, settings=settings, resume=Resume(str(place)) if place else None)
        peer.reach((load_checkpoint(place).epoch if place else 0) + 2)
        peer.leave()
        return peer, saved_by(peer)

    _, without = from_there("without", None)
    begun, place = from_there("begun", without, *SETTINGS)
    assert any(NONE_YET in notice for notice in begun.notices) and averages(place)
    again, place = from_there("again", place, *SETTINGS)
    assert not any(NONE_YET in notice for notice in again.notices) and averages(place)
    _, place = from_there("ended", place)
    assert not any(AVERAGE in each for each in load_checkpoint(place).optimizer["state"].values())
    assert not (place / averaged_file(MODEL)).exists()
