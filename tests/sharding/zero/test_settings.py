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


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (print, ""),
        (torch.ones(3), " has a tensor of 3 elements"),
        ((1.0, [torch.ones(2, 2)]), " has a tensor of 4 elements"),
        (2**64, r" cannot be written: .*2\*\*6"),
        ((0, -(2**63) - 1), r" cannot be written: .*2\*\*6"),
    ],
)
def test_what_cannot_be_described_is_named(value: object, words: str) -> None:
    with pytest.raises(TypeError, match=rf"param_groups\[1\]\['x'\]{words}"):
        describe_settings([{}, {"x": value}])


def test_settings_of_other_groups_do_not_fit() -> None:
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
