"""Whole roles in one process: what begins from a checkpoint does so by its recipe; as another run, if that is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swarmcli.errors import CheckpointError, FingerprintError
from swarmcli.events import CheckpointWritten
from swarmcli.training import load_checkpoint
from swarmcli.training.resumed import Resume

FALLING = "lr_scheduler={name: linear, total_epochs: 100000}"
OLD = ("run_id=old", "optimizer={name: adamw, learning_rate: 0.01}", FALLING)
NEW = (
    "run_id=new",
    "optimizer={name: adamw, learning_rate: 1e-4, betas: [0.9, 0.95], weight_decay: 0.1, max_grad_norm: 1.0}",
    "lr_scheduler={name: constant}",
)


@pytest.fixture
def before(start: Any) -> Path:
    """What a run left that was trained for some epochs."""
    peer = start("before", settings=OLD)
    peer.reach(3)
    return peer.leave_saved()


def test_another_run_begins_from_it_with_settings_of_its_own_and_others_join(start: Any, before: Path) -> None:
    old = load_checkpoint(before)
    peer = start("after", settings=NEW, resume=Resume(str(before), "old"))
    joined = start("joined", peer, settings=NEW)
    for each in (peer, joined):
        each.reach(old.epoch + 3)
    assert peer.notices[0] == (
        f"new begins at epoch {old.epoch}, with the weights and the optimizer's statistics of the run old ({before}), "
        "as a run of its own"
    )
    rate = old.optimizer["param_groups"][0]["lr"]
    assert peer.notices[1] == (
        "the recipe's settings count: learning_rate 0.0001 (0.01 in the checkpoint), betas [0.9, 0.95] ([0.9, 0.999] "
        f"in the checkpoint), weight_decay 0.1 (0.0 in the checkpoint), the rate at epoch {old.epoch} is 0.0001 "
        f"({rate:.3g} in the checkpoint)"
    )
    assert min(each.epoch for each in joined.epochs) >= old.epoch
    stepped = {each.epoch: each.lineage for each in joined.epochs}
    assert any(stepped.get(each.epoch) == each.lineage for each in peer.epochs if each.epoch > old.epoch)
    peer.leave()
    place = joined.leave_saved()
    new = load_checkpoint(place, "new")
    first = new.optimizer["param_groups"][0]
    assert (first["lr"], first["initial_lr"], first["betas"], first["weight_decay"]) == (1e-4, 1e-4, (0.9, 0.95), 0.1)
    steps = {int(values["step"]) for values in new.optimizer["state"].values()}
    assert steps == {new.epoch}  # Adam's go on from those of the checkpoint
    assert new.optimizer["swarm"]["samples_seen"] > old.optimizer["swarm"]["samples_seen"]


def test_the_run_of_a_checkpoint_has_to_be_named(start: Any, before: Path) -> None:
    for said, wanted in ((None, "new"), ("odl", "odl")):
        peer = start(f"said-{said}", settings=NEW, resume=Resume(str(before), said))
        with pytest.raises(CheckpointError) as refusal:
            peer.end()
        assert f"{before} is of the run 'old', not of '{wanted}'" in str(refusal.value)
        assert f"--resume {before} --from-run old" in str(refusal.value)


def test_the_newest_of_another_run_is_found_where_its_peers_are(start: Any, tmp_path: Path) -> None:
    peer = start("old/trainer", settings=(*OLD, f"output_dir={tmp_path}"))
    peer.reach(2)
    last = load_checkpoint(peer.leave_saved()).epoch
    after = start("after", settings=NEW, resume=Resume("latest", "old"))
    after.reach(last + 1)
    assert after.notices[0].startswith(f"new begins at epoch {last}, ")
    place = after.leave_saved()
    assert f"- went on from: `epoch {last} of the run old`" in (place / "README.md").read_text()


def test_a_run_that_goes_on_with_a_changed_recipe_says_what_has_changed_and_else_nothing(
    start: Any, before: Path
) -> None:
    slower = ("run_id=old", "optimizer={name: adamw, learning_rate: 0.001}", FALLING)
    epoch = load_checkpoint(before).epoch
    peer = start("again", settings=slower, resume=Resume(str(before)))
    peer.reach(epoch + 1)
    (told,) = [notice for notice in peer.notices if notice.startswith("the recipe's settings count")]
    assert "learning_rate 0.001 (0.01 in the checkpoint)" in told and "betas" not in told
    place = peer.leave_saved()
    assert load_checkpoint(place).optimizer["param_groups"][0]["initial_lr"] == 0.001
    peer = start("as-it-was", settings=slower, resume=Resume(str(place)))
    peer.reach(load_checkpoint(place).epoch + 1)
    peer.leave()
    assert not any("settings" in notice for notice in peer.notices)


def test_a_home_stays_with_its_recipe_and_says_how_another_run_begins_from_it(start: Any, before: Path) -> None:
    slower = ("optimizer={name: adamw, learning_rate: 0.001}", FALLING)
    home = before.parents[1]
    with pytest.raises(FingerprintError) as refused:
        start("before", settings=("run_id=old", *slower)).end()
    assert f"{home} holds a state of the run 'old': the recipe differs in optimizer.learning_rate (here 0.001)" in str(
        refused.value
    )
    assert f"add `--set run_id=old-2 --resume {home} --from-run old`" in str(refused.value)
    another = start("another", settings=("run_id=old-2", *slower), resume=Resume(str(home), "old"))
    another.reach(load_checkpoint(before).epoch + 1)
    another.leave()
    again = start("before", settings=OLD)  # and the recipe that it was goes on
    again.reach(load_checkpoint(before).epoch + 1)
    again.leave()


def test_statistics_of_another_optimizer_are_refused_before_the_run_is_joined(start: Any, before: Path) -> None:
    settings = ("run_id=new", "optimizer={name: sgd, learning_rate: 0.01, momentum: 0.9}")
    with pytest.raises(CheckpointError, match=r"of another optimizer than sgd.* optimizer\.name"):
        start("other", settings=settings, resume=Resume(str(before), "old")).end()


def test_what_a_peer_begins_with_is_in_its_home_before_its_first_epoch(start: Any, before: Path) -> None:
    begun = start("begun", role="monitor", settings=NEW, resume=Resume(str(before), "old"))
    begun.until(lambda: any(isinstance(event, CheckpointWritten) for event in begun.events))
    kept = load_checkpoint(begun.home / "checkpoints" / "latest", "new")  # should it be killed now
    assert kept.epoch == load_checkpoint(before).epoch
    assert begun.leave_saved().is_relative_to(begun.home)
