"""Levels of process groups: equal to torch's averager bit for bit, and what fails is named in every process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging import hierarchical_model_averager as torchs
from torch.distributed.optim.post_localSGD_optimizer import PostLocalSGDOptimizer

from swarmcli.sharding.levels import HierarchicalModelAverager
from tests.sharding.levels.swarm import odd_tensors
from tests.sharding.processes import World
from tests.sharding.threads import in_threads, ranks

HIERARCHIES: list[tuple[int, dict[int, int], int]] = [
    (3, {1: 1, 2: 3}, 0),  # a third is no binary fraction
    (4, {1: 2, 5: 4}, 3),
    (4, {2: 4, 3: 2, 4: 4}, 0),  # the large groups more often than the small ones
    (4, {4: 2, 2: 4}, 1),  # the first level never has its turn
]


def model(*, mixed: bool) -> torch.nn.Module:
    layers = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3, bias=False), torch.nn.Linear(3, 2))
    layers[0].weight.data = layers[0].weight.data.t().contiguous().t()  # not contiguous
    if mixed:
        layers[1].to(torch.bfloat16)
    layers[2].bias.requires_grad_(False)
    return layers


def train(params: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.data += torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = torch.zeros_like(param) if param.requires_grad else None


def beside_torch(levels: list[list[int]], warmup: int, mixed: bool, groups: bool) -> list[int]:
    """The levels that averaged, by step, after it is checked that every step gave what torch's averager gives."""
    mine, theirs = model(mixed=mixed), model(mixed=mixed)
    theirs.load_state_dict(mine.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = torchs.HierarchicalModelAverager(dict(levels), warmup)
        averager = HierarchicalModelAverager(dict(levels), warmup)
    assert averager.process_group is other.process_group and isinstance(averager, type(other).__mro__[1])
    groups_of = [each.period_process_group_dict for each in (averager, other)]
    mine_by_period, theirs_by_period = (
        {period: dist.get_process_group_ranks(group) for period, group in found.items()} for found in groups_of
    )
    assert mine_by_period == theirs_by_period
    taken = []
    places = [param.data_ptr() for param in mine.parameters()]
    for step in range(12):
        for module in (mine, theirs):
            train(list(module.parameters()), 100 * step + dist.get_rank())
        assert averager.step == other.step == step
        result = averager.average_parameters(given(mine, groups))
        other.average_parameters(given(theirs, groups))
        for own, expected in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert own.dtype == expected.dtype and own.stride() == own.stride()
            assert torch.equal(own, expected), f"step {step}: {own} is not {expected}"
        taken.append(-1 if result is None else result.level)
    assert places == [param.data_ptr() for param in mine.parameters()]
    return taken


def given(module: torch.nn.Module, groups: bool) -> Any:
    if not groups:
        return module.parameters()
    return torch.optim.SGD([{"params": module[0].parameters()}, {"params": module[1:].parameters()}]).param_groups


@pytest.mark.filterwarnings("ignore:the level of period 4 never averages:UserWarning")  # of torch's neither
@pytest.mark.parametrize(("size", "levels", "warmup"), HIERARCHIES)
def test_equal_to_torch(size: int, levels: dict[int, int], warmup: int) -> None:
    taken = in_threads(size, beside_torch, list(levels.items()), warmup, size > 3, size > 3)
    assert all(each == taken[0] for each in taken)
    assert set(taken[0]) >= {-1, len(levels) - 1} - ({-1} if 1 in levels and not warmup else set())


@ranks(3)
def test_parameters_of_all_kinds_are_averaged_where_they_are() -> None:
    averager, params = HierarchicalModelAverager({2: 3}), []
    for tensor in odd_tensors(float(dist.get_rank())):
        params.append(torch.nn.Parameter(tensor))
        params[-1].grad = torch.zeros_like(tensor)
    before = [(param.data_ptr(), param.stride()) for param in params]
    average = averager.average_parameters(params)
    assert average is not None and average.averaged
    assert [(param.data_ptr(), param.stride()) for param in params] == before
    assert all(torch.allclose(param, torch.ones_like(param)) for param in params)
    averager.step = 2
    nothing = averager.average_parameters([torch.nn.Parameter(torch.ones(1))])
    assert nothing is not None and (nothing.averaged, nothing.reason) == (False, "no parameter has a gradient")


@ranks(2)
def test_torchs_optimizer_takes_it() -> None:
    """The optimizer of torch that steps, averages, and keeps the averager's step in its state."""
    mine, theirs = (torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 2)) for _ in range(2))
    theirs.load_state_dict(mine.state_dict())
    wrapped = []
    for net, kind in ((mine, HierarchicalModelAverager), (theirs, torchs.HierarchicalModelAverager)):
        averager = kind({2: 1, 4: 2}, 1)
        wrapped.append((net, PostLocalSGDOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), averager)))
    for step in range(9):
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for net, optimizer in wrapped:
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
    assert all(torch.equal(own, other) for own, other in zip(mine.parameters(), theirs.parameters(), strict=True))
    saved = wrapped[0][1].state_dict()
    assert saved["step"] == wrapped[1][1].state_dict()["step"] == 9
    saved["step"] = 4
    wrapped[0][1].load_state_dict(saved)
    assert wrapped[0][1].averager.step == 4


@ranks(4)
def test_a_part_of_the_processes() -> None:
    """Two halves of a world have hierarchies of their own; nobody else has to be there when groups are made."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    param = torch.nn.Parameter(torch.tensor([float(rank)]))
    param.grad = torch.zeros(1)
    if rank >= 2:
        results = []
        with HierarchicalModelAverager({1: 1, 2: 2}, process_group=halves[1]) as averager:
            for _ in range(2):
                average = averager.average_parameters([param])
                assert average is not None and average.averaged
                results += [average.step, average.level, average.group, average.members, param.item()]
        with pytest.raises(ValueError, match=f"rank {rank}\\) is a member of"):
            HierarchicalModelAverager({2: 2}, process_group=halves[0])
        assert results == [0, 1, "ranks 2, 3", 2, 2.5, 1, 0, f"ranks {rank}", 1, 2.5]
    dist.barrier()


@ranks(2)
def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"ends with groups of 4, but the process group has 2 processes; .* must be 2"):
        HierarchicalModelAverager({2: 2, 4: 4})
    with pytest.raises(ValueError, match=r"groups of 3 at period 1 do not fit into 2 processes; .* divide 2"):
        HierarchicalModelAverager({1: 3, 4: 2})
    with pytest.raises(ValueError, match="is empty"):
        HierarchicalModelAverager()
    averager = HierarchicalModelAverager({2: 2})
    with pytest.raises(RuntimeError, match="needs swarm"):
        averager.load_state_from_peers([torch.nn.Parameter(torch.ones(1))])
    for wrong in (torch.nn.Parameter(torch.ones(1)), torch.nn.Linear(1, 1), [torch.ones(1)], [{"lr": 1}], ["weight"]):
        with pytest.raises(TypeError, match=r"give model.parameters\(\) or optimizer.param_groups"):
            averager.average_parameters(wrong)
    assert averager.step == 0


def test_without_process_groups() -> None:
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group\(\) first, or give swarm="):
        HierarchicalModelAverager({2: 2})


@ranks(2)
def test_unlike_gradients_are_named_and_nothing_has_changed() -> None:
    rank = dist.get_rank()
    params = [torch.nn.Parameter(torch.full((2,), float(rank))) for _ in range(3)]
    for param in params[: 3 - rank]:
        param.grad = torch.zeros(2)
    averager = HierarchicalModelAverager({2: 2})
    with pytest.raises(
        ValueError, match=f"ranks 0, 1 do not .*: {3 - rank} have a gradient here, between 2 and 3 else"
    ):
        averager.average_parameters(params)
    assert [param.tolist() for param in params] == [[float(rank)] * 2] * 3 and averager.step == 0
    params[2].grad = None
    averager.average_parameters(params)
    assert [param.tolist() for param in params] == [[0.5, 0.5], [0.5, 0.5], [float(rank)] * 2]
    assert averager.step == 1


@ranks(2)
def test_parameters_of_equal_shapes_are_told_apart() -> None:
    """Each rank reaches another of two layers of equal shapes."""
    rank = dist.get_rank()
    params = [torch.nn.Parameter(torch.full((2,), value + rank)) for value in (1.0, 100.0)]
    params[rank].grad = torch.zeros(2)
    averager = HierarchicalModelAverager({2: 2})
    with pytest.raises(ValueError, match=r"ranks 0, 1 do not .*: 1 have a gradient here, 1, but other ones, elsewhere"):
        averager.average_parameters(params)
    assert [param.tolist() for param in params] == [[1.0 + rank] * 2, [100.0 + rank] * 2]


def lose_a_process() -> list[Any]:
    param = torch.nn.Parameter(torch.tensor([float(dist.get_rank())]))
    param.grad = torch.zeros(1)
    averager = HierarchicalModelAverager({2: 2})
    dist.barrier()  # one that ends while the other still connects is another fault
    if dist.get_rank() == 1:
        raise SystemExit(1)
    with pytest.raises(RuntimeError):
        averager.average_parameters([param])
    assert param.item() == 0.0
    assert averager.step == 0
    raise KeyError("as expected")


@pytest.mark.e2e
def test_a_process_that_dies() -> None:
    world = World(2)
    survivor, _ = world.outcomes(lose_a_process)
    world.close()
    assert "as expected" in str(survivor.error)
