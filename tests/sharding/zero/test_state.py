"""The whole state: brought together, saved, loaded by as many, fewer or more ranks, and by an unsharded optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD, Adam, Optimizer

from swarmcli.sharding.zero import ZeroRedundancyOptimizer
from swarmcli.sharding.zero.state import placed
from tests.sharding.threads import in_threads, ranks
from tests.sharding.zero.parity import (
    OPTIMIZERS,
    assert_bitwise,
    assert_state_equal,
    make_parameters,
    makers,
    trained,
)
from tests.suites import soak


def groups_of(parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.003}]


def train_and_save(name: str, steps: int) -> list[Any] | None:
    """The consolidated state at the last rank, as lists that can leave the process, and the parameters."""
    parameters = make_parameters()
    optimizer = makers(name)["ours"](groups_of(parameters))
    trained(optimizer, parameters, range(steps))
    last = optimizer.world_size - 1
    optimizer.consolidate_state_dict(to=last)
    if optimizer.rank != last:
        with pytest.raises(RuntimeError, match=f"consolidate_state_dict\\(to={optimizer.rank}\\) on all ranks"):
            optimizer.state_dict()
        return None
    return [optimizer.state_dict(), parameters]


def load_and_go_on(name: str, saved: list[Any], steps: range) -> list[torch.Tensor]:
    state_dict, values = saved
    ours = [torch.nn.Parameter(value.clone()) for value in values]
    optimizer = makers(name)["ours"](groups_of(ours))
    trained(optimizer, ours, range(50, 52))  # is forgotten
    for parameter, value in zip(ours, values, strict=True):
        parameter.data.copy_(value)
    optimizer.load_state_dict(state_dict)
    assert state_dict["state"][0] is not None  # torch's own empties the caller's dict
    trained(optimizer, ours, steps)
    return ours


@pytest.mark.parametrize("name", ["Adam", *soak(sorted(OPTIMIZERS.keys() - {"Adam"}))])
def test_training_goes_on_at_another_number_of_ranks(name: str) -> None:
    saved = in_threads(4, train_and_save, name, 3)[3]
    whole = make_parameters()
    reference = makers(name)["whole"](groups_of(whole))
    trained(reference, whole, range(3))
    assert_state_equal(saved[0], reference.state_dict())
    trained(reference, whole, range(3, 6))
    for ours in in_threads(2, load_and_go_on, name, saved, range(3, 6)):
        assert_bitwise(ours, whole)


@ranks(2)
def test_a_consolidated_state_is_a_copy() -> None:
    """What was consolidated is of that step, though training goes on; a load makes it out of date."""
    parameters = make_parameters()
    optimizer = ZeroRedundancyOptimizer(parameters, SGD, lr=0.1, momentum=0.9)
    trained(optimizer, parameters, range(2))
    optimizer.consolidate_state_dict(to=0)
    if optimizer.rank != 0:
        trained(optimizer, parameters, range(2, 4))
        return
    before = {index: values["momentum_buffer"].clone() for index, values in optimizer.state_dict()["state"].items()}
    trained(optimizer, parameters, range(2, 4))
    after = optimizer.state_dict()
    for index, values in after["state"].items():
        assert torch.equal(values["momentum_buffer"], before[index])
    optimizer.load_state_dict(after)
    with pytest.raises(RuntimeError, match="has not been consolidated on this rank"):
        optimizer.state_dict()


@ranks(2)
def test_what_does_not_fit_is_refused_before_anything_changes() -> None:
    parameters = make_parameters()
    optimizer = ZeroRedundancyOptimizer(groups_of(parameters), Adam, lr=0.01)
    trained(optimizer, parameters, range(1))
    before = optimizer.local_state()
    wrong = Adam(make_parameters(), lr=0.5).state_dict()
    with pytest.raises(ValueError, match=r"groups with \[8\] parameters, this optimizer's have \[3, 5\]"):
        optimizer.load_state_dict(wrong)
    assert optimizer.local_state() == before and optimizer.param_groups[0]["lr"] == 0.01
    with pytest.raises(ValueError, match="to is 2, but there is no rank 2: they are numbered 0 to 1"):
        optimizer.consolidate_state_dict(to=2)


class Nested(Optimizer):
    """State that is more than tensors, in the first parameter of each rank something that cannot be sent."""

    def __init__(self, params: Any, secret: bool = False) -> None:
        super().__init__(params, {"secret": secret})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                history = [torch.tensor([1, 2]), (parameter.grad, None)]
                self.state[parameter] = {"history": history, "calls": 3, "rate": 0.5, "mode": "slow"}
                if group["secret"]:
                    self.state[parameter]["rng"] = object()


@ranks(4)
def test_state_of_any_shape_is_consolidated_or_named() -> None:
    parameters = make_parameters()
    optimizer = ZeroRedundancyOptimizer(parameters, Nested)
    trained(optimizer, parameters, range(1))
    optimizer.consolidate_state_dict(to=1)
    if optimizer.rank == 1:
        state = optimizer.state_dict()["state"]
        assert list(state) == list(range(len(parameters)))
        for index, values in state.items():
            assert (values["calls"], values["rate"], values["mode"]) == (3, 0.5, "slow")
            assert torch.equal(values["history"][0], torch.tensor([1, 2]))
            assert torch.equal(values["history"][1][0], parameters[index].grad)
            assert values["history"][1][1] is None
    secretive = ZeroRedundancyOptimizer(parameters, Nested, secret=True)
    trained(secretive, parameters, range(1))
    error = RuntimeError if secretive.rank == 1 else TypeError
    with pytest.raises(error, match="/rng is a object: only tensors"):
        secretive.consolidate_state_dict(to=1)
    dist.barrier()  # nobody is left waiting


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
