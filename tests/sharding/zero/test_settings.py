from __future__ import annotations

import numpy as np
import pytest
import torch

from swarmcli.sharding.zero.state import apply_settings, describe_settings


def test_settings_come_back_in_their_types() -> None:
    first = torch.optim.AdamW([torch.zeros(2, requires_grad=True)], lr=0.5, betas=(0.1, 0.2))
    second = torch.optim.AdamW([torch.zeros(2, requires_grad=True)])
    apply_settings(second.param_groups, describe_settings(first.param_groups))
    group = second.param_groups[0]
    assert (group["lr"], group["betas"]) == (0.5, (0.1, 0.2))
    assert isinstance(group["params"][0], torch.Tensor)


def test_a_rate_that_is_a_tensor_stays_that_tensor() -> None:
    rate = torch.tensor(0.1)
    groups = [{"lr": rate}]
    apply_settings(groups, describe_settings([{"lr": torch.tensor(0.25)}]))
    assert groups[0]["lr"] is rate
    assert float(rate) == 0.25


def test_what_cannot_be_described_and_what_does_not_fit_is_named() -> None:
    with pytest.raises(TypeError, match=r"param_groups\[0\]\['hook'\]"):
        describe_settings([{"hook": print}])
    with pytest.raises(ValueError, match="not those of 2 parameter groups"):
        apply_settings([{}, {}], describe_settings([{"lr": 1.0}]))


def test_numbers_of_numpy_and_tensors_within_tuples_come_back_where_they_were() -> None:
    betas = (torch.tensor(0.5), torch.tensor(0.75))
    groups = [{"betas": (torch.tensor(0.1), torch.tensor(0.2)), "decay": 0.0, "more": {"scale": torch.tensor([1.0])}}]
    first, second = groups[0]["betas"]  # type: ignore[misc]
    apply_settings(
        groups, describe_settings([{"betas": betas, "decay": np.float64(0.25), "more": {"scale": torch.tensor([4.0])}}])
    )
    assert groups[0]["betas"][0] is first and groups[0]["betas"][1] is second  # type: ignore[index]
    assert (float(first), float(second), groups[0]["decay"]) == (0.5, 0.75, 0.25)
    assert torch.equal(groups[0]["more"]["scale"], torch.tensor([4.0]))  # type: ignore[index]


@pytest.mark.parametrize("value", [torch.ones(3), (1.0, [torch.ones(2, 2)])])
def test_larger_tensors_are_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match=r"param_groups\[0\]\['x'\] has a tensor of [34] elements"):
        describe_settings([{"x": value}])


@pytest.mark.parametrize("value", [2**64, (0, -(2**63) - 1)])
def test_integers_beyond_64_bits_are_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match=r"param_groups\[1\]\['x'\] cannot be written: .*2\*\*6"):
        describe_settings([{}, {"x": value}])
