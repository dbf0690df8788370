"""Statistics of all ranks at rank 0: captured, and replaced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from swarmcli.compression import TensorDescriptor
from swarmcli.optim.state.training_state import CapturedState
from swarmcli.state.distant import DistantTensor
from tests.sharding.threads import in_threads, ranks
from tests.sites.site_state import advance, expect_equal, plain_state, site_state
from tests.suites import soak


def replace(kind: str, behind: int, odd: bool) -> None:
    with site_state(kind, seed=5, odd=odd) as state:
        if state is None:
            return
        donor = plain_state(kind, odd=odd)
        advance(donor, 3)
        advance(state, behind)
        captured = donor.capture().clone()
        state.restore(captured)
        for _ in range(2):
            held = state.capture().clone()
            expect_equal(captured, held)
            for each in (state, donor):
                advance(each, 2, seed=9)
            expect_equal(captured, held)  # what was captured does not step
            captured = donor.capture().clone()
        assert any(isinstance(tensor, DistantTensor) for tensor in held.tensors.values())
        assert state.digest() == donor.digest()
        assert state.optimizer.param_groups[1]["lr"] == 0.01


@pytest.mark.parametrize(
    ("kind", "behind", "odd"),
    [("adamw", 0, True), ("counted", 2, False), *soak([("averaged", 0, False), ("amsgrad", 2, False)])],
)
def test_a_site_holds_and_goes_on_from_what_it_restores_as_one_process_does(kind: str, behind: int, odd: bool) -> None:
    in_threads(4 if behind else 2, replace, kind, behind, odd)


@ranks(2)
def test_statistics_that_do_not_come_are_dropped() -> None:
    with site_state("adamw") as state:
        if state is None:
            return
        advance(state, 2)
        captured = state.capture().clone()
        less = {name: tensor for name, tensor in captured.tensors.items() if not name.startswith("statistic/0/")}
        state.restore(CapturedState(captured.metadata, less))
        assert list(state.capture().tensors) == list(less)
        twin = plain_state("adamw")
        twin.restore(CapturedState(captured.metadata, less))
        for each in (state, twin):
            advance(each, 1)
        expect_equal(twin.capture(), state.capture())


class BadDisk(DistantTensor):
    def read(self, begin: int, end: int) -> memoryview:
        raise OSError("the disk is gone")


def spoil(what: str, captured: CapturedState, owner_of: Callable[[int], int]) -> CapturedState:
    tensors, metadata = dict(captured.tensors), captured.metadata
    match what:
        case "a shape":
            tensors["statistic/1/exp_avg"] = torch.zeros(99)
        case "a number":
            metadata = metadata | {"numbers": {"77/step": 1}}
        case "the groups":
            metadata = metadata | {"groups": []}
        case "the disk":
            name = next(each for each in tensors if "exp_avg" in each and owner_of(int(each.split("/")[1])) != 0)
            tensors[name] = BadDisk(TensorDescriptor(tuple(tensors[name].shape), tensors[name].dtype))
    return CapturedState(metadata, tensors)


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("a shape", ValueError, r"\w"),
        ("a number", ValueError, r"\w"),
        ("the disk", OSError, "disk is gone"),
        *soak([("the groups", ValueError, r"\w")]),
    ],
)
@ranks(2)
def test_what_does_not_fit_changes_nothing_on_any_rank(what: str, error: type[Exception], words: str) -> None:
    with site_state("adamw") as state:
        if state is None:
            return
        advance(state, 2)
        before = state.capture().clone()
        with pytest.raises(error, match=words):
            state.restore(spoil(what, before, state.optimizer.zero.owner_of))
        expect_equal(before, state.capture())
        advance(state, 1)  # the site goes on
