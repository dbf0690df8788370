"""One contract for averaging over process groups and over swarm groups."""

from __future__ import annotations

import pytest
import torch

from tests.sharding.levels import contract
from tests.sharding.threads import in_threads
from tests.suites import soak

IN_MAKE_TEST = ("shapes_types_and_places", "equal_bits", "other_parameters_later")
CASES = pytest.mark.parametrize("case", contract.CASES)


@CASES
def test_process_groups(case: str) -> None:
    assert_equal_bits(in_threads(contract.SIZE, contract.in_process_group, case))


@pytest.mark.parametrize("case", [*IN_MAKE_TEST, *soak(case for case in contract.CASES if case not in IN_MAKE_TEST)])
def test_swarm_groups(case: str) -> None:
    assert_equal_bits(contract.in_swarm(case))


def assert_equal_bits(results: list[list[torch.Tensor]]) -> None:
    assert len(results) == contract.SIZE
    for tensors in results[1:]:
        assert len(tensors) == len(results[0])
        assert all(torch.equal(own, other) for own, other in zip(tensors, results[0], strict=True))
