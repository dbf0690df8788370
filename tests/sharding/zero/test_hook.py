"""The step inside DDP's backward pass: the same parameters as DDP and a sharded step after it, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR

from swarmcli.sharding.zero import ZeroRedundancyOptimizer
from tests.sharding.threads import DRAWING, in_threads, ranks
from tests.sharding.zero.ddp import (
    EACH_HOOK,
    HOOKS,
    backward,
    make_model,
    make_overlapped,
    make_zero,
    values,
    wrap,
)
from tests.suites import soak

ITERATIONS = range(6)


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(own, other)


def assert_same_at_all_ranks(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        first = tensor.clone()
        dist.broadcast(first, src=0)
        assert torch.equal(tensor, first)


def train_both(
    ours: DistributedDataParallel,
    theirs: DistributedDataParallel,
    stepped_after: Any,
    iterations: range = ITERATIONS,
    compute: Callable[[DistributedDataParallel, int], None] = backward,
    afterwards: Callable[[], Any] = lambda: None,
) -> None:
    """With the hook, which steps from the third iteration on, and with a step after the backward pass."""
    for iteration in iterations:
        compute(ours, iteration)
        compute(theirs, iteration)
        if iteration >= 2:
            stepped_after.step()
        afterwards()
    assert_same(values(ours), values(theirs))


def gradients(model: torch.nn.Module) -> list[Any]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def train_beside_the_step_after(name: str, hook: str, options: dict[str, Any], without_update: int) -> int:
    """How many buckets' gradients were reduced in an iteration."""
    frozen, static = options.get("frozen", False), {"static_graph": True} if options.get("static_graph") else {}
    ddp, zero = make_overlapped(name, hook, **options)
    reference = wrap(make_model(frozen=frozen), **static)
    stepped_after = make_zero(reference, name)
    for iteration in ITERATIONS:
        backward(ddp, iteration)
        backward(reference, iteration)
        if iteration >= without_update:
            stepped_after.step()
        assert_same(values(ddp), values(reference))
        assert_same(gradients(ddp), gradients(reference))
    assert_same_at_all_ranks(values(ddp))
    own = {zero.owner_of(index) for index in range(len(zero.parameters))}
    assert own == set(range(dist.get_world_size()))
    return len(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(","))


@pytest.mark.parametrize(
    ("name", "hook", "options", "without_update"),
    [
        ("Adam", "at the end", {"frozen": True}, 2),
        ("SGD", "interleaved", {"shard_buckets": True}, 2),
        ("AdamW", "interleaved", {"static_graph": True}, 3),  # whose buckets are final an iteration later
        *soak([("Adagrad", "at the end", {"gradient_as_bucket_view": True}, 2), ("RMSprop", "interleaved", {}, 2)]),
    ],
)
def test_it_equals_a_step_after_the_backward_pass(
    name: str, hook: str, options: dict[str, Any], without_update: int
) -> None:
    assert min(in_threads(2, train_beside_the_step_after, name, hook, options, without_update)) >= 4


def follow_a_schedule(hook: str) -> None:
    ddp, zero = make_overlapped("AdamW", hook)
    reference = wrap(make_model())
    stepped_after = make_zero(reference, "AdamW")
    schedules = [StepLR(zero, 1, gamma=0.5), StepLR(stepped_after, 1, gamma=0.5)]
    train_both(ddp, reference, stepped_after, afterwards=lambda: [schedule.step() for schedule in schedules])


def accumulate_over_two_passes(hook: str) -> None:
    def twice(model: DistributedDataParallel, iteration: int) -> None:
        with model.no_sync():
            backward(model, iteration)
        backward(model, 50 + iteration, zero_grad=False)

    ddp, _zero = make_overlapped("Adam", hook)
    reference = wrap(make_model())
    train_both(ddp, reference, make_zero(reference, "Adam"), compute=twice)


@EACH_HOOK
def test_schedules_and_accumulated_gradients_work_as_without(hook: str) -> None:
    in_threads(2, follow_a_schedule, hook)
    in_threads(2, accumulate_over_two_passes, hook)


@EACH_HOOK
@ranks(2)
def test_any_hook_may_reduce(hook: str) -> None:
    """A hook that is a chain of futures, and one whose result is a tensor of its own."""
    for compress in (fp16_compress_hook, reduce_to_another_tensor):
        ddp = wrap(make_model())
        zero = make_zero(ddp, "SGD", overlap_with_ddp=True)
        ddp.register_comm_hook(None, HOOKS[hook](compress, ddp, zero))
        reference = wrap(make_model())
        reference.register_comm_hook(None, lambda state, bucket: compress(state, bucket))  # noqa: B023
        train_both(ddp, reference, make_zero(reference, "SGD"))


def reduce_to_another_tensor(_state: Any, bucket: dist.GradBucket) -> Any:
    total, size = bucket.buffer().clone(), dist.get_world_size()
    future = dist.all_reduce(total, async_op=True).get_future()
    return future.then(lambda done: done.value()[0] / (2 * size))


def train_in_a_part_of_the_world(hook: str) -> list[int]:
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = halves[dist.get_rank() % 2]
    ddp = wrap(make_model(), process_group=group)
    zero = make_zero(ddp, "Adam", overlap_with_ddp=True, process_group=group)
    ddp.register_comm_hook(None, HOOKS[hook](lambda state, bucket: allreduce_hook(group, bucket), ddp, zero))
    reference = wrap(make_model(), process_group=group)
    train_both(ddp, reference, make_zero(reference, "Adam", process_group=group))
    return [zero.owner_of(index) for index in range(len(zero.parameters))]


@EACH_HOOK
def test_a_part_of_the_world_may_train(hook: str) -> None:
    owners = in_threads(4, train_in_a_part_of_the_world, hook)
    assert owners == [owners[0]] * 4
    assert set(owners[0]) == {0, 1}


def whole_state(zero: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """At every rank."""
    states = []
    for rank in range(zero.world_size):
        zero.consolidate_state_dict(to=rank)
        states += [zero.state_dict()] if rank == zero.rank else []
    return states[0]


@EACH_HOOK
@ranks(2)
def test_the_state_is_saved_and_loaded_as_without(hook: str) -> None:
    ddp, zero = make_overlapped("Adam", hook)
    for iteration in range(4):
        backward(ddp, iteration)
    saved, before = whole_state(zero), values(ddp)
    assert saved["state"].keys() == set(range(len(before)))
    whole = torch.optim.Adam(make_model().parameters(), lr=0.01)
    whole.load_state_dict(saved)  # what an unsharded one takes
    backward(ddp, 4)
    after = values(ddp)
    zero.load_state_dict(saved)
    for parameter, value in zip(ddp.parameters(), before, strict=True):
        parameter.data.copy_(value)
    backward(ddp, 4)
    assert_same(values(ddp), after)


@EACH_HOOK
@ranks(2)
def test_parameters_in_other_memory_are_sent_all_the_same(hook: str) -> None:
    ddp, _zero = make_overlapped("SGD", hook)
    reference = wrap(make_model())
    stepped_after = make_zero(reference, "SGD")
    train_both(ddp, reference, stepped_after, ITERATIONS[:4])
    for parameter in ddp.parameters():
        parameter.data = parameter.data.clone()
    train_both(ddp, reference, stepped_after, ITERATIONS[4:])


class OfTwoTypes(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with DRAWING:
            torch.manual_seed(1)
            self.narrow = torch.nn.Linear(16, 16)
            self.wide = torch.nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.wide(self.narrow(inputs).double())
        return outputs.float()


@EACH_HOOK
@ranks(2)
def test_parameters_may_be_of_several_types(hook: str) -> None:
    ddp, reference = wrap(OfTwoTypes(), bucket_cap_mb=25), wrap(OfTwoTypes(), bucket_cap_mb=25)
    zero = make_zero(ddp, "Adam", overlap_with_ddp=True)
    ddp.register_comm_hook(None, HOOKS[hook](allreduce_hook, ddp, zero, shard_buckets=True))
    train_both(ddp, reference, make_zero(reference, "Adam"))
    assert_same_at_all_ranks(values(ddp))
