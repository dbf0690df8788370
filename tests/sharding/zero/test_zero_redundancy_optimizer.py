"""The optimizer beyond equal numbers: who owns what, settings, closures, changes on the way, types and shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import OneCycleLR

from swarmcli.sharding.zero import ZeroRedundancyOptimizer
from tests.sharding.threads import in_threads, ranks
from tests.sharding.zero.parity import SHAPES, assert_bitwise, logged, make_parameters, set_gradients, trained


def own_only_a_share() -> list[int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    parameters = make_parameters()
    optimizer = ZeroRedundancyOptimizer(parameters, Adam, lr=0.01)
    assert (optimizer.rank, optimizer.world_size, optimizer.global_rank) == (rank, size, rank)
    own = optimizer.indices_of(rank)
    assert own == [index for index in range(len(parameters)) if optimizer.owner_of(index) == rank]
    assert sorted(index for each in range(size) for index in optimizer.indices_of(each)) == list(range(len(parameters)))
    assert optimizer.local_state() == {}
    trained(optimizer, parameters, range(1))
    state = optimizer.local_state()
    assert list(state) == own
    assert state[own[0]] is optimizer.optim.state[parameters[own[0]]] is optimizer.state[parameters[own[0]]]
    assert {id(parameter) for parameter in optimizer.optim.state} == {id(parameters[index]) for index in own}
    theirs = TorchZero(make_parameters(), Adam, lr=0.01)
    assert [len(group["params"]) for group in theirs.optim.param_groups] == [len(own)]
    return [parameters[index].numel() for index in own]


def test_each_rank_keeps_the_state_of_its_share_only() -> None:
    ranks = 4
    sizes = in_threads(ranks, own_only_a_share)
    total, largest = sum(sum(each) for each in sizes), max(max(each) for each in sizes)
    assert all(sum(each) <= (total + (ranks - 1) * largest) / ranks for each in sizes)


@pytest.mark.parametrize(
    ("shares", "expected"),
    [((24e9, 8e9), [6, 2]), ((None, 1), [4, 4]), ((0, 1), [0, 8])],
)
@ranks(2)
def test_shares_follow_what_each_rank_can_hold(shares: Any, expected: list[int]) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(10)) for _ in range(8)]
    optimizer = ZeroRedundancyOptimizer(parameters, SGD, lr=1.0, momentum=0.5, shares=shares[dist.get_rank()])
    assert [len(optimizer.indices_of(rank)) for rank in range(optimizer.world_size)] == expected
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(10)) for _ in range(8)], "lr": 2.0})
    assert [len(optimizer.indices_of(rank)) for rank in range(optimizer.world_size)] == [2 * each for each in expected]
    for index, parameter in enumerate(optimizer.parameters):
        parameter.grad = torch.full((10,), float(index))
    optimizer.step()
    for index, parameter in enumerate(optimizer.parameters):
        assert torch.equal(parameter, torch.full((10,), -float(index) * (1.0 if index < 8 else 2.0)))


@pytest.mark.parametrize("bucket_view", [False, True])
@ranks(4)
def test_parameters_of_several_types_at_once(bucket_view: bool) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    ours, whole = make_parameters(dtypes), make_parameters(dtypes)
    optimizer = ZeroRedundancyOptimizer(ours, AdamW, parameters_as_bucket_view=bucket_view, lr=0.01)
    trained(optimizer, ours, range(4))
    trained(AdamW(whole, lr=0.01), whole, range(4))
    assert_bitwise(ours, whole)


class Peculiar(SGD):
    """An optimizer whose step takes no closure but something else, and leaves a note in its groups."""

    def step(self, *, note: str) -> str:  # type: ignore[override]
        super().step()
        self.param_groups[0]["note"] = note
        return f"loss of {note}"


@ranks(4)
def test_closures_and_arguments_reach_the_local_optimizer() -> None:
    parameters = make_parameters()
    peculiar: Any = ZeroRedundancyOptimizer(parameters, Peculiar, lr=0.1)
    set_gradients(parameters, 0)
    assert peculiar.step(note="this") == "loss of this"
    assert peculiar.param_groups[0]["note"] == "this"

    ours, whole = make_parameters(), make_parameters()
    optimizer = ZeroRedundancyOptimizer(ours, Adam, lr=0.1)
    reference = Adam(whole, lr=0.1)
    calls = []

    def closure(parameters: list[torch.nn.Parameter], who: Any) -> torch.Tensor:
        who.zero_grad()
        loss = torch.stack([(parameter**2).sum() for parameter in parameters]).sum()
        loss.backward()
        calls.append(who)
        return loss

    for _ in range(3):
        loss = optimizer.step(lambda: closure(ours, optimizer))  # type: ignore[arg-type, return-value]
        assert torch.equal(loss, reference.step(lambda: closure(whole, reference)))  # type: ignore
    assert len(calls) == 6
    assert_bitwise(ours, whole)


@ranks(2)
def test_the_exposed_groups_drive_the_local_optimizer() -> None:
    ours, whole = make_parameters(), make_parameters()
    optimizer, reference = ZeroRedundancyOptimizer(ours, Adam, lr=0.1), Adam(whole, lr=0.1)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)  # of the local optimizer's defaults
    for each, parameters in ((optimizer, ours), (reference, whole)):
        schedule = OneCycleLR(each, max_lr=0.3, total_steps=10)  # changes the betas, too
        for step in range(5):
            set_gradients(parameters, step)
            each.step()
            schedule.step()
        each.param_groups[0]["weight_decay"] = 0.5
        trained(each, parameters, range(5, 7))
    assert_bitwise(ours, whole)
    assert optimizer.optim.param_groups[0]["weight_decay"] == 0.5
    optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(RuntimeError, match="add them with add_param_group"):
        optimizer.step()


@ranks(2)
def test_named_parameters_are_welcome() -> None:
    named = [(f"p{index}", parameter) for index, parameter in enumerate(make_parameters())]
    optimizer = ZeroRedundancyOptimizer(iter(named), SGD, lr=0.1, momentum=0.9)
    optimizer.add_param_group({"params": [("late", torch.nn.Parameter(torch.zeros(3)))]})
    assert optimizer.param_groups[1]["param_names"] == ["late"]
    trained(optimizer, optimizer.parameters, range(1))  # type: ignore[arg-type]
    optimizer.consolidate_state_dict()
    if optimizer.rank == 0:
        state_dict = optimizer.state_dict()
        assert state_dict["param_groups"][0]["param_names"] == [name for name, _ in named]
        optimizer.load_state_dict(state_dict)


@ranks(2)
def test_a_group_that_is_refused_changes_nothing() -> None:
    parameters = make_parameters()
    optimizer = ZeroRedundancyOptimizer(parameters, SGD, lr=0.1)
    for group, error in [
        ({"params": [torch.sparse_coo_tensor(size=(2, 3))]}, "parameter 8 is sparse"),
        ({"params": [parameters[0]]}, "appear in more than one parameter group"),
    ]:
        with pytest.raises(ValueError, match=error):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 1
    trained(optimizer, parameters, range(1))
    fresh = make_parameters()
    trained(SGD(fresh, lr=0.1), fresh, range(1))
    assert_bitwise(parameters, fresh)


def storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("bucket_view", [False, True])
@ranks(2)
def test_changes_of_what_is_trained_are_said_and_followed(bucket_view: bool) -> None:
    parameters = make_parameters()
    optimizer = ZeroRedundancyOptimizer(parameters, SGD, parameters_as_bucket_view=bucket_view, lr=0.1)
    with logged() as messages:
        trained(optimizer, parameters, range(2))
        parameters[0].requires_grad = parameters[5].requires_grad = False
        trained(optimizer, parameters, range(2, 4))
        assert all(
            (storage_bytes(parameters[index]) > parameters[index].numel() * 4) == bucket_view for index in (0, 5)
        )
        parameters[0].requires_grad = True
        trained(optimizer, parameters, range(4, 6))
        assert (storage_bytes(parameters[0]) > parameters[0].numel() * 4) == bucket_view
        parameters[3].data = parameters[3].data.clone()
        trained(optimizer, parameters, range(6, 8))
    assert all(torch.isfinite(parameter).all() for parameter in parameters)
    assert len(messages) == (3 if bucket_view else 2)
    assert "the trainable parameters changed (6 of 8 are now)" in messages[0]
    assert "the trainable parameters changed (7 of 8 are now)" in messages[1]
    assert not bucket_view or "other memory" in messages[2]


def freeze_on_one_rank() -> list[torch.Tensor]:
    """A parameter that one rank froze by mistake: whoever owns it says whether it is stepped; all end alike."""
    parameters = make_parameters()
    optimizer = ZeroRedundancyOptimizer(parameters, SGD, parameters_as_bucket_view=True, lr=0.1)
    for index in (0, 4):
        parameters[index].requires_grad = optimizer.rank == 0
    trained(optimizer, parameters, range(2))
    return [parameter.detach().clone() for parameter in parameters]


def test_ranks_that_freeze_different_parameters_stay_alike() -> None:
    one, two = in_threads(2, freeze_on_one_rank)
    assert_bitwise(one, two)


@ranks(2)
def test_parameters_whose_memory_is_replaced_stay_the_same_everywhere() -> None:
    ours, whole = make_parameters(), make_parameters()
    optimizer = ZeroRedundancyOptimizer(ours, SGD, parameters_as_bucket_view=True, lr=0.1)
    reference = SGD(whole, lr=0.1)
    for step in range(4):
        trained(optimizer, ours, range(step, step + 1))
        trained(reference, whole, range(step, step + 1))
        for parameter in (*ours, *whole):
            parameter.data = parameter.data * 2
    assert_bitwise(ours, whole)


@ranks(4)
def test_ranks_are_those_of_the_group() -> None:
    odd = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return
    ours, whole = make_parameters(), make_parameters()
    optimizer = ZeroRedundancyOptimizer(ours, Adam, odd, lr=0.01)
    assert optimizer.global_rank == dist.get_rank() and optimizer.rank == dist.get_rank() // 2
    assert optimizer.join_process_group is odd and optimizer.join_device == torch.device("cpu")
    trained(optimizer, ours, range(3))
    trained(Adam(whole, lr=0.01), whole, range(3))
    assert_bitwise(ours, whole)
    optimizer.consolidate_state_dict(to=1)
    assert optimizer.rank == 0 or len(optimizer.state_dict()["state"]) == len(SHAPES)
