"""What the constructor refuses, and that its words say what, where and how to mend it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim.functional_adam import _FunctionalAdam
from torch.optim import SGD

from swarmcli.sharding.zero import ZeroRedundancyOptimizer
from swarmcli.sharding.zero.arguments import check_parameters, gathered_shares
from tests.sharding.threads import ranks

ONE, TWO = torch.zeros(2), torch.zeros(3)


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (ONE, TypeError, "should be an iterable of Tensors or dicts, but got torch.FloatTensor"),
        ([], ValueError, "empty parameter list"),
        ([ONE, {"params": [TWO]}], TypeError, "one of the params is dict"),
        ([{"params": [ONE]}, {"parameters": [TWO]}], ValueError, r"group has no 'params' \(only \['parameters'\]\)"),
    ],
)
def test_params_that_are_none(params: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ZeroRedundancyOptimizer(params, SGD, lr=0.1)


def test_tensors_that_cannot_be_sharded() -> None:
    sparse = torch.sparse_coo_tensor(size=(2, 3))
    with pytest.raises(ValueError, match="parameter 1 is sparse"):
        check_parameters([ONE, sparse])
    with pytest.raises(ValueError, match="parameters 0 and 2 are one tensor"):
        check_parameters([ONE, TWO, ONE])
    with pytest.raises(ValueError, match="parameters 0 and 1 are one tensor"):
        check_parameters([ONE, ONE], first=1)


def test_without_a_process_group() -> None:
    with pytest.raises(ValueError, match=r"no process group: call .*init_process_group"):
        ZeroRedundancyOptimizer([ONE], SGD, lr=0.1)


@ranks(2)
def test_the_constructor_refuses() -> None:
    only_zero = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="process 1 is no member"):
            ZeroRedundancyOptimizer([ONE], SGD, only_zero, lr=0.1)
    with pytest.raises(ValueError, match="sparse"):
        ZeroRedundancyOptimizer([torch.sparse_coo_tensor(size=(2, 3))], SGD, lr=0.1)
    with pytest.raises(ValueError, match="_FunctionalAdam is a functional optimizer, which only overlap_with_ddp"):
        ZeroRedundancyOptimizer([ONE], _FunctionalAdam, lr=0.1)
    with pytest.raises(ValueError, match="shares cannot be given with overlap_with_ddp"):
        ZeroRedundancyOptimizer([ONE], SGD, shares=2.0, overlap_with_ddp=True, lr=0.1)


@ranks(2)
def test_parameters_that_differ_between_ranks_are_named_at_all() -> None:
    """At rank 1 something is not as at rank 0; both are told, and nobody is left waiting."""
    rank = dist.get_rank()

    def given(*shapes: int, dtype: torch.dtype = torch.float32, frozen: bool = False) -> list[torch.Tensor]:
        return [torch.zeros(shape, dtype=dtype).requires_grad_(not frozen) for shape in shapes]

    layout = "the shapes, types, order or groups of rank 1 are not those of rank 0"
    for theirs, message in (
        (given(2), "rank 0 has 2, rank 1 has 1"),
        (given(3, 2), layout),
        (given(2, 4), layout),
        (given(2, 3, dtype=torch.float64), layout),
        (given(2, 3, frozen=True), r"the trainable ones \(requires_grad\) of rank 1"),
        ([{"params": given(2)}, {"params": given(3)}], layout),
    ):
        with pytest.raises(ValueError, match=f"params differ between the ranks: {message}"):
            ZeroRedundancyOptimizer(theirs if rank else given(2, 3), SGD, lr=0.1)
    with pytest.raises(ValueError, match="the parameters_as_bucket_view of rank 1"):
        ZeroRedundancyOptimizer(given(2), SGD, parameters_as_bucket_view=rank == 1, lr=0.1)
    optimizer = ZeroRedundancyOptimizer(given(2), SGD, lr=0.1)
    with pytest.raises(ValueError, match=layout):
        optimizer.add_param_group({"params": given(5 + rank)})
    assert len(optimizer.param_groups) == len(optimizer.parameters) == 1
    optimizer.add_param_group({"params": given(5)})
    optimizer.step()


@ranks(2)
def test_misuse_is_named() -> None:
    for optimizer_class in ("adam", SGD([TWO], lr=0.1)):
        with pytest.raises(
            TypeError, match=r"optimizer_class is a .*: pass the class itself, such as torch.optim.Adam"
        ):
            ZeroRedundancyOptimizer([ONE], optimizer_class, lr=0.1)
    with pytest.raises(TypeError, match=r"process_group is a str: pass what torch.distributed.new_group returned"):
        ZeroRedundancyOptimizer([ONE], SGD, "gloo", lr=0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"shares is \[1.0, 3.0\]: pass how much this rank can hold, one number"):
        ZeroRedundancyOptimizer([ONE], SGD, shares=[1.0, 3.0], lr=0.1)  # type: ignore[arg-type]
    optimizer = ZeroRedundancyOptimizer([ONE], SGD, lr=0.1)
    with pytest.raises(TypeError, match="to is '0', a str: pass the number of a rank"):
        optimizer.consolidate_state_dict("0")  # type: ignore[arg-type]
    for index in (99, -1):
        with pytest.raises(ValueError, match=f"index is {index}, but there is no parameter {index}: .* 0 to 0"):
            optimizer.owner_of(index)
    with pytest.raises(TypeError, match="state_dict is a NoneType: pass what"):
        optimizer.load_state_dict(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="state_dict has no 'state' and no 'param_groups'"):
        optimizer.load_state_dict({})
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.*load state_dict\(\) into another"):
            duplicate(optimizer)


@ranks(2)
def test_shares_that_share_nothing_out_are_refused_at_all_ranks() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    for shares, message in (
        ((1.0, -2.0), r"share of rank 1 is -2\.0"),
        ((float("nan"), 1), "share of rank 0 is nan"),
        ((0, 0.0), "all shares are 0"),
    ):
        with pytest.raises(ValueError, match=message):
            gathered_shares(shares[rank], group)
