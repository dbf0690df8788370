"""Whole roles in one process: nobody begins a run anew of which its contacts, or its home, tell that it is further."""

from __future__ import annotations

import shutil
import threading
from typing import Any

import pytest

from swarmcli.errors import NoDonorReachable, UsageError
from swarmcli.peer.checkpoints import ALONE
from tests.peer.roles import Sums


def test_a_newcomer_whose_only_contact_leaves_while_it_loads_its_model_waits(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start("first")
    first.reach(2)
    loads, build = threading.Event(), Sums.build_model

    def slowly(task: Sums, **how: Any) -> Any:
        loads.wait()
        return build(task, **how)

    monkeypatch.setattr(Sums, "build_model", slowly)
    newcomer = start("newcomer", first)
    saved = first.leave()
    assert saved.startswith("saved epoch")
    assert ALONE in first.notices
    loads.set()
    newcomer.until(lambda: any("instead of training another model" in text for text in newcomer.notices))
    assert "127.0.0.1:" in newcomer.watch.look().alarm and newcomer.watch.look().state == "stranded"
    with pytest.raises(NoDonorReachable):
        newcomer.leave()
    assert newcomer.epochs == []
    with pytest.raises(UsageError, match=r"first/checkpoints/epoch-.* holds epoch .* of this run"):
        start("first", begins_anew=True).end()


def test_a_peer_whose_home_has_been_further_waits_for_those_it_knew_unless_told_to_begin_anew(start: Any) -> None:
    first = start("first")
    second = start("second", first)
    second.reach(2)
    second.leave()
    # Where the first came to the last epoch a moment later, the second has saved it.
    shutil.rmtree(second.home / "checkpoints", ignore_errors=True)
    first.leave()
    again = start("second")
    again.until(lambda: any("the journal in" in text for text in again.notices))
    with pytest.raises(NoDonorReachable):
        again.leave()
    start("second", begins_anew=True).reach(1)


def test_a_peer_that_comes_back_to_a_run_that_has_ended_says_so(start: Any) -> None:
    settings = ("max_epochs=2",)
    monitor = start("monitor", role="monitor", settings=settings)
    second = start("second", monitor, settings=settings)
    second.end()
    monitor.leave()
    shutil.rmtree(second.home / "checkpoints", ignore_errors=True)
    again = start("second", settings=settings)
    again.until(lambda: any("this run ended at epoch 2" in text for text in again.notices))
    with pytest.raises(NoDonorReachable):
        again.leave()
