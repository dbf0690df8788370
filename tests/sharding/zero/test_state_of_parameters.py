"""State dicts beside the share of a rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swarmcli.sharding.zero.state import copy_settings, placed


def test_settings_go_over_but_parameters_stay() -> None:
    target: list[dict[str, Any]] = [{"params": [1], "param_names": ["a"], "lr": 1.0, "betas": (0, 1)}]
    copy_settings([{"params": [2, 3], "param_names": ["b", "c"], "lr": 0.5, "new": 7}], target)
    assert target == [{"params": [1], "param_names": ["a"], "lr": 0.5, "betas": (0, 1), "new": 7}]


def test_placed_values_are_copies_in_their_own_type() -> None:
    parameter = torch.zeros(2, dtype=torch.bfloat16)
    value = {"exp_avg": torch.ones(2), "history": [torch.ones(1), (3, torch.ones(()))], "func": None}
    copy = placed(value, parameter, {})
    value["exp_avg"].zero_()  # type: ignore[union-attr]
    assert copy["exp_avg"].tolist() == [1.0, 1.0]
    assert copy["exp_avg"].dtype is torch.float32
    assert isinstance(copy["history"][1], tuple) and copy["func"] is None


@pytest.mark.parametrize(
    ("settings", "device"), [({}, "cpu"), ({"capturable": True}, "meta"), ({"fused": True}, "meta")]
)
def test_zero_dimensional_state_stays_on_the_cpu_unless_its_kernel_counts_on_the_device(
    settings: dict[str, Any], device: str
) -> None:
    parameter = torch.zeros(2, device="meta")  # any device that is not the CPU
    copy = placed({"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}, parameter, settings)
    assert copy["step"].device.type == device
    assert copy["exp_avg"].device.type == "meta"
