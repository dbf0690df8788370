"""Whole roles in one process that take outer steps or average their weights over epochs: what a monitor keeps, what
all share, and from where peers go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swarmcli.checkpoints.layout import MODEL, averaged_file, epoch_of
from swarmcli.errors import CheckpointError
from swarmcli.training import load_checkpoint
from swarmcli.training.resumed import Resume
from swarmcli.training.schedule import AVERAGE
from tests.peer.roles import Peer

OUTER = ("outer={optimizer: nesterov, lr: 0.5, inner_batch_size: 8}", "ema_decay=0.5")
ADAM = ("outer={optimizer: adam, lr: 0.1, inner_batch_size: 8}", "ema_decay=0.5")


def lineages(peer: Peer) -> dict[int, str]:
    return {each.epoch: each.lineage for each in peer.epochs}


def test_a_monitor_keeps_the_anchor_and_a_trainer_goes_on_from_it(start: Any) -> None:
    monitor = start("monitor", role="monitor", settings=OUTER)
    trainers = [start(name, monitor, settings=OUTER) for name in ("one", "other")]
    for peer in (monitor, *trainers):
        peer.reach(6)
    assert any(lineages(monitor).items() & lineages(trainer).items() for trainer in trainers)
    told = [peer.leave() for peer in (*trainers, monitor)]
    # A trainer saves what nobody who stays has come to yet; the last state is on a disk in any case.
    kept = [epoch_of(Path(text.rpartition(" at ")[2])) for text in told if not text.startswith("the model is safe")]
    assert max(kept) == max(peer.epoch for peer in (*trainers, monitor)), told
    saved = load_checkpoint(Path(told[-1].rpartition(" at ")[2]))
    assert saved.optimizer["swarm"]["inner"][0]["lr"] > 0
    assert {"momentum_buffer", "ema"} == saved.optimizer["state"][0].keys(), "the outer optimizer's, and the average"

    back = start("monitor", role="monitor", settings=OUTER)
    again = start("one", back, settings=OUTER)
    again.reach(saved.epoch + 2)
    assert min(each.epoch for each in again.epochs) >= saved.epoch


def test_a_trainer_without_a_monitor_saves_what_all_hold_and_resumes_with_the_recipes_rates(start: Any) -> None:
    one = start("one", settings=OUTER)
    one.reach(3)
    place = one.leave_saved()
    saved = load_checkpoint(place)
    faster = (OUTER[0].replace("0.5", "0.25"), OUTER[1], "optimizer.learning_rate=0.02")
    back = start("another", settings=faster, resume=Resume(str(place)))
    back.reach(saved.epoch + 2)
    told = "\n".join(back.notices)
    assert "learning_rate 0.02" in told, told
    assert load_checkpoint(back.leave_saved()).optimizer["param_groups"][0]["lr"] == 0.25


def test_other_outer_steps_than_a_checkpoint_has_are_refused(start: Any) -> None:
    one = start("one", settings=OUTER)
    one.reach(2)
    place = one.leave_saved()
    for name, settings in (("adam", ADAM), ("none", ())):
        with pytest.raises(CheckpointError, match=rf"other outer steps than those of small \(outer.optimizer: {name}"):
            start(f"with {name}", settings=settings, resume=Resume(str(place))).end()


SETTINGS = ("ema_decay=0.9", "optimizer.learning_rate=0.05")
NONE_YET = "holds no averaged weights: the average begins after its next epoch"


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
    places = []
    for monitor in (first, late):
        monitor.reach(trainer.epoch)
        places.append(monitor.leave_saved())
    assert late.epochs[0].epoch > 3
    mine, theirs = averages(places[0]), averages(places[1])
    assert all(torch.equal(each, other) for each, other in zip(mine, theirs, strict=True))


def test_it_begins_where_a_checkpoint_has_none_goes_on_where_it_has_and_ends_with_the_key(start: Any) -> None:
    def from_there(name: str, place: Path | None, *settings: str) -> tuple[Peer, Path]:
        peer = start(name, settings=settings, resume=Resume(str(place)) if place else None)
        peer.reach((load_checkpoint(place).epoch if place else 0) + 2)
        return peer, peer.leave_saved()

    _, without = from_there("without", None)
    begun, place = from_there("begun", without, *SETTINGS)
    assert any(NONE_YET in notice for notice in begun.notices) and averages(place)
    again, place = from_there("again", place, *SETTINGS)
    assert not any(NONE_YET in notice for notice in again.notices) and averages(place)
    _, place = from_there("ended", place)
    assert not any(AVERAGE in each for each in load_checkpoint(place).optimizer["state"].values())
    assert not (place / averaged_file(MODEL)).exists()
