from __future__ import annotations

import pytest
import torch
from torch import nn

from swarmcli.optim.config import Role
from swarmcli.training.demand import ASSUMED_PACE, Demand, demand_of
from swarmcli.training.device import Compute
from tests.recipe.recipes import small

OUTLINE = nn.Sequential(nn.Linear(100, 200, device="meta"), nn.Linear(200, 10, device="meta"))
NUMBERS = 100 * 200 + 200 + 200 * 10 + 10


def demand(*overrides: str, role: Role = "trainer", pace: float = 0.0) -> Demand:
    return demand_of(small(*overrides), OUTLINE, role, Compute(torch.device("cpu")), pace=pace)


def test_each_epoch_moves_at_most_twice_what_is_averaged() -> None:
    assert demand().epoch == 2 * 4 * NUMBERS
    assert demand("compression.gradients=float16").epoch == 2 * 2 * NUMBERS
    local = demand("local_updates.enabled=true", "averaging.average_opt_statistics=[exp_avg_sq]")
    assert local.epoch == 2 * 4 * 2 * NUMBERS


def test_thin_matrices_count_where_they_are_sent() -> None:
    thin = demand("gradient_averaging.method=powersgd", "gradient_averaging.rank=4")
    assert thin.epoch == 2 * 4 * (4 * (100 + 200) + 200 + 4 * (200 + 10) + 10)


def test_an_hour_is_told_by_the_contacts_pace_or_by_a_guess() -> None:
    assert demand(pace=12.0).an_hour == 300 * demand().epoch and demand(pace=12.0).pace_is_told
    assert demand().an_hour == 3600 / ASSUMED_PACE * demand().epoch and not demand().pace_is_told


@pytest.mark.parametrize(("role", "copies"), [("trainer", 3), ("monitor", 3), ("auxiliary", 0)])
def test_the_state_is_the_model_and_its_statistics(role: Role, copies: int) -> None:
    assert demand(role=role).state == copies * 4 * NUMBERS
    assert demand().parameters == NUMBERS
