"""Checkpoints beside a run: which epochs are written, of which moment, and what a failure does."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from swarmcli.errors import CheckpointError, SiteError
from swarmcli.roles.checkpoints import BackgroundCheckpoints, require_result


class FakeOptimizer:
    def __init__(self) -> None:
        self.local_epoch = 0
        self.statistics = torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {"state": {0: {"sum": self.statistics}}, "param_groups": []}


class FakeStore:
    """Writes as slowly as its test wants."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.written: list[tuple[int, float, Any]] = []
        self.error: Exception | None = None

    def write(self, model: nn.Module, state: Mapping[str, Any], epoch: int, *, shards: Any = None) -> Path | None:
        self.free.wait()
        if self.error is not None:
            raise self.error
        self.written.append((epoch, next(model.parameters()).item(), state["state"]))
        return Path(f"epoch-{epoch:06d}")


class FakeShards:
    def __init__(self) -> None:
        self.copied = 0

    def copy(self) -> None:
        self.copied += 1


class Run:
    def __init__(self, every: int = 1, shards: Any = None) -> None:
        self.store, self.optimizer, self.model = FakeStore(), FakeOptimizer(), nn.Linear(1, 1, bias=False)
        self.checkpoints = BackgroundCheckpoints(self.store, self.model, self.optimizer, every, shards=shards)  # type: ignore[arg-type]

    def come_to(self, epoch: int) -> None:
        self.optimizer.local_epoch = epoch
        nn.init.constant_(self.model.weight, epoch)
        self.checkpoints.look()

    @property
    def epochs(self) -> list[int]:
        return [epoch for epoch, _, _ in self.store.written]


def test_multiples_are_written_and_the_end() -> None:
    run = Run(every=3)
    with run.checkpoints:
        for epoch in range(1, 8):
            run.come_to(epoch)
            run.checkpoints._writer.submit(lambda: None).result()  # lets the disk keep up
    assert run.epochs == [3, 6, 7]


def test_with_zero_only_the_end_is_written_and_once() -> None:
    run = Run(every=0)
    with run.checkpoints:
        run.come_to(5)
    assert run.epochs == [5]


def test_a_slow_disk_costs_checkpoints_and_each_is_of_one_moment() -> None:
    run = Run()
    with run.checkpoints:
        run.store.free.clear()
        for epoch in (1, 2, 3):
            run.come_to(epoch)
        run.optimizer.statistics.fill_(9.0)
        run.store.free.set()
    assert run.epochs == [1, 3]
    assert [weight for _, weight, _ in run.store.written] == [1.0, 3.0]
    assert float(run.store.written[0][2][0]["sum"]) == 0.0


def test_shards_are_copied_at_that_moment_and_the_statistics_left_to_them() -> None:
    shards = FakeShards()
    run = Run(shards=shards)
    with run.checkpoints:
        run.come_to(1)
        assert shards.copied == 1
    assert run.store.written == [(1, 1.0, {})]


def test_a_site_that_broke_while_it_wrote_is_heard_of_at_the_next_checkpoint() -> None:
    run = Run()
    run.store.error = SiteError("rank 1 is gone")
    with pytest.raises(SiteError, match="rank 1 is gone"), run.checkpoints:
        run.come_to(1)
        run.checkpoints._writer.submit(lambda: None).result()
        run.come_to(2)
    assert run.epochs == []


def test_after_an_error_nothing_more_is_written() -> None:
    run = Run()
    with pytest.raises(KeyError), run.checkpoints:
        run.optimizer.local_epoch = 4
        raise KeyError
    assert run.epochs == []


def test_a_result_that_was_not_written_is_no_good_end(tmp_path: Path) -> None:
    peer = SimpleNamespace(home=SimpleNamespace(path=tmp_path / "home"))
    require_result(tmp_path, peer)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"its result is not in .*home.*make room"):
        require_result(None, peer)  # type: ignore[arg-type]
