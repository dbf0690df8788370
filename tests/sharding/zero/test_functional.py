"""Optimizers stepped with gradients that are handed to them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim.utils import functional_optim_map, register_functional_optim

from swarmcli.sharding.zero.overlap import (
    STEPPED_IN_PARTS,
    FunctionalOptimizer,
    functional_equivalent,
    is_functional,
)
from tests.suites import soak


def make_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(3, 2, generator=generator)) for _ in range(3)]


@pytest.mark.parametrize(
    "optimizer_class",
    [
        torch.optim.SGD,
        torch.optim.Adam,
        *soak(sorted(STEPPED_IN_PARTS - {torch.optim.SGD, torch.optim.Adam}, key=repr)),
    ],
)
def test_in_parts_it_steps_as_the_whole(optimizer_class: Any) -> None:
    ours, theirs = make_parameters(), make_parameters()
    whole = optimizer_class(theirs)
    parts = FunctionalOptimizer(optimizer_class(ours))
    for step in range(3):
        gradients = [torch.full((3, 2), 0.1 * (step + index)) for index in range(3)]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        whole.step()
        parts.step(gradients={ours[1]: gradients[1]})
        parts.step(gradients={ours[2]: gradients[2], ours[0]: gradients[0]})
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(own, other)
    assert parts.param_groups[0]["params"] == ours
    assert parts.state.keys() == (set() if optimizer_class is torch.optim.SGD else set(ours))


class Own(torch.optim.SGD):
    pass


def test_a_class_that_may_not_be_stepped_in_parts_is_refused_until_it_is_made_known() -> None:
    with pytest.raises(ValueError, match="LBFGS has none"):
        functional_equivalent(torch.optim.LBFGS)
    with pytest.raises(ValueError, match="Own has none"):
        functional_equivalent(Own)
    register_functional_optim(Own, Own)
    try:
        assert functional_equivalent(Own) is Own
    finally:
        del functional_optim_map[Own]


def test_torchs_variants_are_not_imported_for_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed.optim.utils")
    assert functional_equivalent(torch.optim.Adam) is torch.optim.Adam
    assert not is_functional(torch.optim.Adam)
    assert "torch.distributed.optim.utils" not in sys.modules
