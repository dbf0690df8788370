from __future__ import annotations

import numpy as np
import pytest
import torch

from swarmcli.sharding.zero.state import apply_settings, describe_settings


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (print, ""),
        ((1.0, [torch.ones(2, 2)]), " has a tensor of 4 elements"),
        ((0, -(2**63) - 1), r" cannot be written: .*2\*\*6"),
    ],
)
def test_what_cannot_be_described_is_named(value: object, words: str) -> None:
    with pytest.raises(TypeError, match=rf"param_groups\[1\]\['x'\]{words}"):
        describe_settings([{}, {"x": value}])


def test_settings_of_other_groups_do_not_fit() -> None:
    with pytest.raises(ValueError, match="not those of 2 parameter groups"):
        apply_settings([{}, {}], describe_settings([{"lr": 1.0}]))


def test_settings_come_back_in_their_types_and_tensors_where_they_were() -> None:
    betas = (torch.tensor(0.5), torch.tensor(0.75))
    groups = [{"betas": (torch.tensor(0.1), torch.tensor(0.2)), "decay": 0.0, "more": {"scale": torch.tensor([1.0])}}]
    first, second = groups[0]["betas"]  # type: ignore[misc]
    given = {
        "betas": betas,
        "decay": np.float64(0.25),
        "more": {"scale": torch.tensor([4.0])},
        "params": [1],
        "own": (1, 2),
    }
    apply_settings(groups, describe_settings([given]))
    assert "params" not in groups[0] and groups[0]["own"] == (1, 2)
    assert groups[0]["betas"][0] is first and groups[0]["betas"][1] is second  # type: ignore[index]
    assert (float(first), float(second), groups[0]["decay"]) == (0.5, 0.75, 0.25)
    assert torch.equal(groups[0]["more"]["scale"], torch.tensor([4.0]))  # type: ignore[index]
