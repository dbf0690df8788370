"""What the overlapping optimizer refuses, warns of and does not do yet."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.distributed.optim.functional_adam import _FunctionalAdam

from swarmcli.errors import ShardingError
from swarmcli.sharding.zero import ZeroRedundancyOptimizer
from tests.sharding.threads import ranks
from tests.sharding.zero.ddp import EACH_HOOK, HOOKS, backward, make_model, make_overlapped, make_zero, values, wrap
from tests.sharding.zero.parity import logged


@ranks(2)
def test_what_cannot_work_is_refused_at_once() -> None:
    parameters = list(make_model().parameters())
    with pytest.raises(RuntimeError, match="one parameter group, this optimizer has 2"):
        groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
        ZeroRedundancyOptimizer(groups, torch.optim.Adam, overlap_with_ddp=True)
    with pytest.raises(ValueError, match="LBFGS has none"):
        ZeroRedundancyOptimizer(parameters, torch.optim.LBFGS, overlap_with_ddp=True)
    with pytest.raises(ValueError, match="functional"):
        ZeroRedundancyOptimizer(parameters, _FunctionalAdam)
    ddp = wrap(make_model())
    for make_hook in HOOKS.values():
        with pytest.raises(ValueError, match="made with overlap_with_ddp=True"):
            make_hook(allreduce_hook, ddp, make_zero(ddp, "Adam"))
        with pytest.raises(TypeError, match=r"ddp is a .*Sequential: wrap the model in DistributedDataParallel"):
            make_hook(allreduce_hook, make_model(), make_zero(ddp, "Adam"))
        with pytest.raises(TypeError, match=r"zero is a .*: this hook steps a swarmcli.ZeroRedundancyOptimizer"):
            make_hook(allreduce_hook, ddp, TorchZero(ddp.parameters(), torch.optim.Adam))
        with pytest.raises(ValueError, match="never rebuilds its buckets"):
            searching = wrap(make_model(), find_unused_parameters=True)
            make_hook(allreduce_hook, searching, make_zero(searching, "Adam", overlap_with_ddp=True))
        with pytest.raises(ValueError, match=r"sharded over ranks \[0, 1\], DDP reduces over \[\d\]"):
            alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
            apart = wrap(make_model(), process_group=alone)
            make_hook(allreduce_hook, apart, make_zero(apart, "Adam", overlap_with_ddp=True))


@ranks(2)
def test_torchs_hooks_are_told_of_ours() -> None:
    ddp = wrap(make_model())
    zero = make_zero(ddp, "Adam", overlap_with_ddp=True)
    assert zero.initialized
    for make_hook in (ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved):
        with pytest.raises(ShardingError, match=r"register swarmcli\.sharding\.hook_with_zero_step "):
            make_hook(allreduce_hook, ddp, zero)


@ranks(2)
def test_a_functional_class_does_and_the_bucket_view_is_ignored_with_a_warning() -> None:
    ddp = wrap(make_model())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), _FunctionalAdam, overlap_with_ddp=True, lr=0.01)
    ddp.register_comm_hook(None, HOOKS["at the end"](allreduce_hook, ddp, zero))
    other, _zero = make_overlapped("Adam")
    for iteration in range(3):
        backward(ddp, iteration)
        backward(other, iteration)
    assert zero.optim.state
    with logged() as messages:
        ZeroRedundancyOptimizer(
            make_model().parameters(), torch.optim.Adam, parameters_as_bucket_view=True, overlap_with_ddp=True
        )
    assert any("parameters_as_bucket_view=True is ignored" in message for message in messages)


@ranks(2)
def test_nothing_happens_until_the_buckets_are_final_and_step_never_does_anything() -> None:
    ddp, zero = make_overlapped("Adam")
    start = values(ddp)
    for iteration in range(2):
        for call in (
            zero.consolidate_state_dict,
            zero.state_dict,
            zero.local_state,
            lambda: zero.load_state_dict({"state": {}, "param_groups": []}),
            lambda: zero.owner_of(0),
        ):
            with pytest.raises(RuntimeError, match="nobody owns anything until DDP has rebuilt its buckets"):
                call()
        backward(ddp, iteration)
        with logged() as messages:
            assert zero.step() is None
        assert any("the hook steps" in message for message in messages)
    assert all(torch.equal(before, now) for before, now in zip(start, values(ddp), strict=True))
    backward(ddp, 2)
    assert not any(torch.equal(before, now) for before, now in zip(start, values(ddp), strict=True))
    stepped = values(ddp)
    zero.step()
    assert all(torch.equal(before, now) for before, now in zip(stepped, values(ddp), strict=True))
    with pytest.raises(RuntimeError, match="one parameter group"):
        zero.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})


@EACH_HOOK
@ranks(2)
def test_changed_trainability_is_an_error_at_every_rank(hook: str) -> None:
    ddp, zero = make_overlapped("Adam", hook)
    for iteration in range(3):
        backward(ddp, iteration)
    before = values(ddp)
    zero.parameters[0].requires_grad_(False)  # of the last bucket; so the first ones come to the hook
    with pytest.raises(RuntimeError, match="trainable parameters changed"):
        backward(ddp, 3)
    assert all(torch.equal(one, other) for one, other in zip(before, values(ddp), strict=True))


@ranks(2)
def test_uneven_inputs_are_refused() -> None:
    ddp, zero = make_overlapped("Adam")
    with pytest.raises(RuntimeError, match="uneven inputs cannot be joined"), Join([ddp, zero]):
        backward(ddp, 0)


@EACH_HOOK
@ranks(2)
def test_ddp_and_the_optimizer_must_train_the_same_parameters(hook: str) -> None:
    for fewer, message in ((True, "was not given"), (False, r"parameters \[12\] are trainable but not among DDP's")):
        ddp = wrap(make_model())
        given = list(ddp.parameters())[1:] if fewer else [*ddp.parameters(), torch.nn.Parameter(torch.zeros(3))]
        zero = ZeroRedundancyOptimizer(given, torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
        ddp.register_comm_hook(None, HOOKS[hook](allreduce_hook, ddp, zero))
        for iteration in range(2):
            backward(ddp, iteration)
        with pytest.raises(ValueError, match=message):
            backward(ddp, 2)


@ranks(4)
def test_shared_buckets_even_out_what_ranks_hold() -> None:
    largest = []  # of what a rank steps, with whole buckets and with shared ones
    for shard_buckets in (False, True):
        ddp, zero = make_overlapped("Adam", shard_buckets=shard_buckets, bucket_cap_mb=1)
        for iteration in range(3):
            backward(ddp, iteration)
        loads = [sum(zero.parameters[i].numel() for i in zero.indices_of(rank)) for rank in range(zero.world_size)]
        largest.append(max(loads))
    total = sum(parameter.numel() for parameter in make_model().parameters())
    assert largest[0] == total  # one bucket
    assert largest[1] <= total / 4 + 16 * 16
