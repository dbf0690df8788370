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
from swarmcli.sharding.zero.arguments import agreed_weights, check_parameters, listed_params
from tests.sharding.threads import ranks

ONE, TWO = torch.zeros(2), torch.zeros(3)


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (ONE, TypeError, "one torch.FloatTensor: pass an iterable"),
        (1.2, TypeError, "params is a float: pass an iterable"),
        ([], ValueError, "params is empty"),
        ([ONE, {"params": [TWO]}], TypeError, "mixes dicts and tensors"),
        ([ONE, ("two", TWO)], TypeError, r"mixes \(name, tensor\) pairs and tensors"),
        ([ONE, 42], TypeError, r"params\[1\] is a int"),
        ([{"params": [ONE]}, {"parameters": [TWO]}], ValueError, r"group 1 has no 'params' \(only \['parameters'\]\)"),
    ],
)
def test_params_that_are_none(params: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        listed_params(params)


@pytest.mark.parametrize(
    "params", [[ONE, TWO], iter([ONE]), [{"params": iter([ONE])}], [("one", ONE), ("two", TWO)], {ONE: 1}]
)
def test_params_that_are_some(params: Any) -> None:
    assert len(listed_params(params)) in (1, 2)


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
        ZeroRedundancyOptimizer([ONE], SGD, shares=[1, 2], overlap_with_ddp=True, lr=0.1)


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
    for shares in ("a", "12", [1.0, "x"], [1.0, None], object()):
        with pytest.raises(TypeError, match=r"shares is .*: pass the weights of all ranks, such as \[1.0, 3.0\]"):
            ZeroRedundancyOptimizer([ONE], SGD, shares=shares, lr=0.1)  # type: ignore[arg-type]
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
def test_all_ranks_agree_on_their_shares_or_fail_together() -> None:
    group = dist.group.WORLD
    assert group is not None
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=r"shares differ: rank 0 has \[1.0, 3.0\], rank 1 has \[1.0, 1.0\]"):
        agreed_weights([1.0, float(rank)] if rank else [1.0, 3.0], group)
    with pytest.raises(ValueError, match="different kinds of shares"):
        agreed_weights([1.0, 2.0] if rank else 7.0, group)
    with pytest.raises(ValueError, match="3 weights for 2 ranks"):
        agreed_weights([1.0, 2.0, 3.0], group)
    with pytest.raises(ValueError, match=r"share of rank 0 is -1\.0"):
        agreed_weights([1.0, 2.0] if rank else [-1.0, 2.0], group)
    with pytest.raises(ValueError, match="share of rank 1 is nan"):
        agreed_weights(float("nan") if rank else 1.0, group)
    for own, agreed in ((None, [1.0, 1.0]), ((3, 1), [3.0, 1.0]), (10 + rank, [10.0, 11.0])):
        assert agreed_weights(own, group) == agreed
