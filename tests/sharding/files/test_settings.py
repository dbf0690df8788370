from __future__ import annotations

import pytest
import torch

from swarmcli.sharding.files.settings import apply_settings, describe_settings


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
