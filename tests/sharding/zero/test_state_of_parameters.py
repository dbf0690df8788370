"""State dicts beside the share of a rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swarmcli.sharding.zero.state import copy_settings, own_entries, placed


def test_settings_go_over_but_parameters_stay() -> None:
    target: list[dict[str, Any]] = [{"params": [1], "param_names": ["a"], "lr": 1.0, "betas": (0, 1)}]
    copy_settings([{"params": [2, 3], "param_names": ["b", "c"], "lr": 0.5, "new": 7}], target)
    assert target == [{"params": [1], "param_names": ["a"], "lr": 0.5, "betas": (0, 1), "new": 7}]


def test_own_entries_are_found_by_the_numbers_of_the_groups() -> None:
    state_dict = {
        "state": {10: {"step": 1}, 12: {"step": 3}, 11: {}},
        "param_groups": [{"params": [12]}, {"params": [10, 11]}],
    }
    groups = [{"params": ["x"]}, {"params": ["y", "z"]}]
    assert own_entries(state_dict, groups, [0, 2]) == {0: {"step": 3}}
    assert own_entries(state_dict, groups, [1]) == {1: {"step": 1}}


@pytest.mark.parametrize("saved", [[[0, 1, 2]], [[0], [1]], [[0, 1], [2]]])
def test_a_dict_of_other_groups_is_refused(saved: list[list[int]]) -> None:
    state_dict = {"state": {}, "param_groups": [{"params": indices} for indices in saved]}
    sizes = [len(indices) for indices in saved]
    with pytest.raises(ValueError, match=rf"groups with \{sizes} parameters, this optimizer's have \[1, 2\]"):
        own_entries(state_dict, [{"params": ["x"]}, {"params": ["y", "z"]}], [0])


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
