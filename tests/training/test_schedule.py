from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from swarmcli.recipe import SchedulerSettings
from swarmcli.training import build_scheduler
from swarmcli.training.schedule import rate_by_epoch

from .small_tasks import build_optimizer, small


def rates(settings: SchedulerSettings, max_epochs: int | None, count: int) -> list[float]:
    factor = rate_by_epoch(settings, max_epochs)
    return [pytest.approx(factor(epoch)) for epoch in range(count)]


def test_a_rate_rises_in_its_warm_up_and_falls_to_its_floor_and_stays() -> None:
    assert rates(SchedulerSettings(warmup_epochs=3), None, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    settings = SchedulerSettings(name="linear", min_lr_ratio=0.2)
    assert rates(settings, 4, 6) == [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    pieces = [{"epochs": 2, "start": 0, "end": 1}, {"epochs": 2, "start": 1, "end": 0.5, "shape": "cosine"}]
    assert rates(SchedulerSettings.model_validate({"pieces": pieces}), None, 6) == [0.0, 0.5, 1.0, 0.75, 0.5, 0.5]


def test_the_schedule_moves_once_per_epoch_and_goes_on_from_its_state(tmp_path: Path) -> None:
    recipe = small(tmp_path, "optimizer.learning_rate=0.4", "lr_scheduler={name: linear, total_epochs: 4}")

    def rates_of(epochs: int, state: Any = None) -> tuple[list[float], Any]:
        optimizer = build_optimizer(recipe, nn.Linear(2, 2))
        scheduler, seen = build_scheduler(recipe, optimizer), []
        if state is not None:
            scheduler.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        for _ in range(epochs):
            seen.append(optimizer.param_groups[0]["lr"])
            assert len({group["lr"] for group in optimizer.param_groups}) == 1
            optimizer.step()
            scheduler.step()
        return seen, (scheduler.state_dict(), optimizer.state_dict())

    seen, state = rates_of(2)
    assert seen == pytest.approx([0.4, 0.3]) and rates_of(2, state)[0] == pytest.approx([0.2, 0.1])


@pytest.mark.parametrize(
    ("name", "extra", "keys"),
    [
        ("constant_with_warmup", {}, {}),
        ("linear", {}, {}),
        ("cosine", {}, {}),
        ("polynomial", {"power": 2.0, "lr_end": 0.0}, {"power": 2.0}),
        ("cosine_with_restarts", {"num_cycles": 3}, {"cycles": 3}),
        ("inverse_sqrt", {}, {}),
        ("warmup_stable_decay", {"num_decay_steps": 10}, {"decay_epochs": 10}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}, {"min_lr_ratio": 0.1}),
    ],
)
def test_shapes_are_those_of_transformers_behind_the_warm_up(
    name: Any, extra: dict[str, Any], keys: dict[str, Any]
) -> None:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    theirs = get_scheduler(name, optimizer, 4, 40, scheduler_specific_kwargs=extra)
    if name in ("linear", "cosine", "cosine_with_restarts", "polynomial", "cosine_with_min_lr", "warmup_stable_decay"):
        keys = keys | {"total_epochs": 40}
    ours = rate_by_epoch(SchedulerSettings(name=name, warmup_epochs=4, **keys), None)
    for epoch in range(45):
        if epoch >= 4 and (epoch < 40 or "total_epochs" not in keys):  # some of theirs rise again behind the end
            assert ours(epoch) == pytest.approx(theirs.get_last_lr()[0], abs=1e-9), epoch
        optimizer.step()
        theirs.step()
