"""The same parameters as torch's sharded optimizer, bit for bit, and as an unsharded one, whatever happens between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from tests.sharding.threads import in_threads
from tests.sharding.zero.parity import (
    assert_bitwise,
    assert_state_equal,
    make_parameters,
    makers,
    set_gradients,
)
from tests.suites import soak


def train_eventfully(name: str, bucket_view: bool) -> None:
    """Groups, a schedule, a parameter frozen and thawed, a group added, the state saved and loaded."""
    runs: dict[str, tuple[list[torch.nn.Parameter], Any]] = {}
    for kind, make in makers(name, parameters_as_bucket_view=bucket_view).items():
        if kind == "whole":
            make = makers(name)["whole"]
        parameters = make_parameters()
        parameters[2].requires_grad = False
        groups = [{"params": parameters[:3]}, {"params": parameters[3:6], "lr": 0.003, "weight_decay": 0.05}]
        optimizer = make(groups)
        schedule = LambdaLR(optimizer, lambda epoch: 0.7**epoch)
        for step in range(8):
            if step == 3:
                optimizer.add_param_group({"params": parameters[6:], "initial_lr": 0.02})
                schedule.base_lrs.append(0.02)
                schedule.lr_lambdas.append(lambda epoch: 0.9**epoch)
            if step == 5:
                parameters[2].requires_grad = True
                parameters[4].requires_grad = False
            set_gradients(parameters, step)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        runs[kind] = (parameters, optimizer)
    assert_bitwise(runs["ours"][0], runs["torch"][0])
    assert_bitwise(runs["ours"][0], runs["whole"][0])
    for kind in ("ours", "torch"):
        runs[kind][1].consolidate_state_dict(to=1)
    if runs["ours"][1].rank == 1:
        assert_state_equal(runs["ours"][1].state_dict(), runs["torch"][1].state_dict())
        assert_state_equal(runs["ours"][1].state_dict(), runs["whole"][1].state_dict())


@pytest.mark.parametrize(
    ("ranks", "name", "bucket_view"),
    [(2, "Adam", False), (4, "SGD", True), *soak([(2, "Adagrad", False), (2, "RMSprop", True), (4, "AdamW", False)])],
)
def test_same_as_torch_and_as_unsharded(ranks: int, name: str, bucket_view: bool) -> None:
    in_threads(ranks, train_eventfully, name, bucket_view)
