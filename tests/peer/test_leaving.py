"""Whole roles in one process: what is left on the disk when peers leave, and from where they go on when they return."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swarmcli.errors import CheckpointError
from swarmcli.training import STREAM


def test_two_trainers_without_a_monitor_lose_nothing(start: Any) -> None:
    one = start("one")
    other = start("other", one)
    one.reach(3)
    other.reach(3)
    for peer in (one, other):
        peer.stop.set()
    outcomes = [one.end(), other.end()]
    assert any(outcome.startswith("saved epoch") for outcome in outcomes), outcomes
    last = max(one.epoch, other.epoch)
    assert last in one.saved + other.saved

    # First whoever has saved it: who comes back to nobody and has nothing begins anew.
    first, then = ("one", "other") if last in one.saved else ("other", "one")
    back = start(first)
    back.reach(last + 1)
    assert back.notices[1].startswith(f"going on from epoch {last}, saved at"), back.notices
    second = start(then, back)
    back.reach(last + 2)
    second.reach(last + 2)
    for peer in (back, second):
        peer.until(lambda peer=peer: any(each.peers == 2 for each in peer.epochs))
        assert min(each.epoch for each in peer.epochs) >= last
        peer.stop.set()


def test_what_a_lone_trainer_computed_of_an_epoch_that_has_not_ended_is_told_as_lost(start: Any) -> None:
    one = start("one")
    one.reach(2)
    one.peer.activity.stop()  # as Ctrl-C does
    assert one.end().startswith("saved epoch")
    summary, stream = one.peer.summary, json.loads((one.home / STREAM).read_text())["stream"]
    drawn = json.loads(stream)[2]["drawn"]
    assert summary.samples + summary.lost == 8 * drawn
    assert summary.lost == 0 or summary.why_lost == "nobody else computes at present"


def test_the_newer_of_two_checkpoints_wins(start: Any) -> None:
    older, newer = start("older"), start("newer")  # that never meet
    older.reach(2)
    older.leave()
    newer.reach(older.epoch + 5)
    newer.leave()
    slowly = ("target_batch_size=2400",)
    for each in (older, newer):  # as homes of earlier versions are, which do not say of which recipe their state is
        (each.home / "hello.json").unlink()
    back = start("older", settings=slowly)
    back.reach(older.epoch + 1)
    ahead = start("newer", back, settings=slowly)
    back.reach(newer.epoch + 1)
    ahead.reach(newer.epoch + 1)
    assert (back.peer.summary.downloads, ahead.peer.summary.downloads) == (1, 0)
    assert ahead.notices[1].startswith(f"going on from epoch {newer.epoch}, saved at {newer.home}")


def test_a_full_disk_when_leaving_is_an_error_and_spares_what_is_there(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = start("one")
    peer.reach(2)
    peer.leave()
    kept = peer.saved
    peer = start("one")
    monitor = start("monitor", peer, role="monitor")
    for each in (peer, monitor):
        each.reach(kept[-1] + 1)

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("swarmcli.training.checkpoint.flush", full)
    for each in (monitor, peer):
        with pytest.raises(CheckpointError, match=r"is not in .*/checkpoints: see the warning above"):
            each.leave()
    assert any("No space left on device" in notice for notice in peer.notices) and peer.saved == kept


def test_a_damaged_checkpoint_gives_way_to_the_one_before_and_where_all_are_nobody_begins_anew(start: Any) -> None:
    peer = start("one", settings=("checkpoint.every_epochs=1",))
    peer.until(lambda: len(peer.saved) > 1)
    peer.leave()
    newest, before = sorted(peer.saved)[-1], sorted(peer.saved)[-2]
    (peer.home / "checkpoints" / f"epoch-{newest:06d}" / "model.safetensors").write_bytes(b"nothing")
    back = start("one")
    back.reach(before + 1)
    assert any(f"cannot go on from {peer.home}/checkpoints/epoch-{newest:06d}" in notice for notice in back.notices)
    assert any(notice.startswith(f"going on from epoch {before},") for notice in back.notices)
    back.leave()
    for file in peer.home.rglob("*.safetensors"):
        file.write_bytes(b"nothing")
    alone = start("one")  # which does not begin anew
    with pytest.raises(CheckpointError, match=r"is damaged.*move them away if it should"):
        alone.end()


def test_at_the_end_of_a_run_the_monitor_says_where_the_model_is(start: Any) -> None:
    monitor = start("monitor", role="monitor", settings=("max_epochs=4",))
    trainer = start("trainer", monitor, settings=("max_epochs=4",))
    outcome = trainer.end()
    assert outcome in (
        "the model is safe: peer monitor has it (epoch 4)",
        f"saved epoch 4 at {trainer.home}/checkpoints/epoch-000004",
    )
    where = f"saved epoch 4 at {monitor.home}/checkpoints/epoch-000004"
    monitor.until(lambda: any("the run has finished" in notice for notice in monitor.notices))
    assert f"the run has finished; {where}; Ctrl-C to leave" in monitor.notices
    status = monitor.watch.look()
    assert (status.state, status.result) == ("finished", where)
    assert monitor.leave() == where
