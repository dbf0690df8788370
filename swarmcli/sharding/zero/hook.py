"""Communication hooks by which DistributedDataParallel's backward pass also steps a ZeroRedundancyOptimizer.

    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=1e-3)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))

Everything happens in the thread that runs the backward pass, in the order of the buckets: gloo matches the operations
of a group by their order, and callbacks in its own threads would start them in another order at every rank.
"""

# Annotations are evaluated here: DDP compares those of the hook with the classes.
import contextlib
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from swarmcli.sharding.zero.overlap import Overlap
from swarmcli.sharding.zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer

Reduced = torch.futures.Future[torch.Tensor]
CommunicationHook = Callable[[Any, dist.GradBucket], Reduced]


def hook_with_zero_step(
    hook: CommunicationHook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> CommunicationHook:
    """Returns `hook`, followed by the step once the last bucket is handed over: it overlaps with the reductions.

    In the first two iterations (three with `static_graph=True`) no parameter changes, because DDP's buckets are final
    only from the second (third) forward pass on. `shard_buckets` splits buckets between ranks, which evens out what
    they hold. Do not call `zero.step()`. All ranks make the hook alike.

    Raises TypeError unless `ddp` is a DistributedDataParallel and `zero` a ZeroRedundancyOptimizer; ValueError if
    `zero` was made without `overlap_with_ddp`, its group's ranks are not those of `ddp`, or DDP looks for unused
    parameters (it then keeps its first buckets, and unused parameters would not be stepped). In the backward pass:
    ValueError if DDP's parameters are not the optimizer's, ShardingError if trainability changed or a rank is gone;
    some parameters may then be a step ahead of others.
    """
    _checked(ddp, zero).shard_buckets = shard_buckets
    return _SteppingHook(hook, ddp, zero, zero.process_group, interleaved=False).on_bucket


def hook_with_zero_step_interleaved(
    hook: CommunicationHook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> CommunicationHook:
    """As `hook_with_zero_step`, but each bucket is stepped and sent as soon as it is reduced, during the backward pass.

    Better if communication is fast compared with computation. The new parameters travel in a process group of their
    own, which this makes: a collective call. A parameter changes when its gradient is complete, so nothing that runs
    later in the same backward pass may still use its old value, for example through a detached view.
    """
    _checked(ddp, zero).shard_buckets = shard_buckets
    ranks = dist.get_process_group_ranks(zero.process_group)
    own = dist.new_group(ranks, backend=dist.get_backend(zero.process_group), use_local_synchronization=True)
    return _SteppingHook(hook, ddp, zero, own, interleaved=True).on_bucket


def _checked(ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer) -> Overlap:
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"ddp is a {torch.typename(ddp)}: wrap the model in DistributedDataParallel and pass that")
    if not isinstance(zero, ZeroRedundancyOptimizer):
        raise TypeError(
            f"zero is a {torch.typename(zero)}: this hook steps a swarmcli.ZeroRedundancyOptimizer; torch's has "
            "hooks of its own (torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook)"
        )
    if zero.overlap is None:
        raise ValueError("this hook steps an optimizer made with overlap_with_ddp=True: make it so")
    ours, theirs = (dist.get_process_group_ranks(group) for group in (zero.process_group, ddp.process_group))
    if ours != theirs:
        raise ValueError(f"the optimizer is sharded over ranks {ours}, DDP reduces over {theirs}: use the same group")
    if ddp.find_unused_parameters and not ddp.static_graph:
        raise ValueError(
            "with find_unused_parameters=True DDP never rebuilds its buckets, which overlap_with_ddp=True waits for: "
            "use static_graph=True, or train without overlap"
        )
    return zero.overlap


class _SteppingHook:
    """The state of one hook: the buckets seen before shares are assigned, then, in each backward pass, those not
    stepped yet."""

    def __init__(
        self,
        hook: CommunicationHook,
        ddp: DistributedDataParallel,
        zero: ZeroRedundancyOptimizer,
        group: dist.ProcessGroup,
        *,
        interleaved: bool,
    ) -> None:
        self._hook = hook
        self._ddp = weakref.ref(ddp)  # weak, since DDP holds this object
        assert zero.overlap is not None
        self._zero, self._overlap = zero, zero.overlap
        self._group = group
        self._interleaved = interleaved
        self._seen: list[list[torch.Tensor]] = []
        self._reducing: deque[tuple[dist.GradBucket, Reduced]] = deque()
        self._sending: list[tuple[torch.device, dist.Work]] = []
        self._streams: dict[torch.device, torch.Stream] = {}

    def on_bucket(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The hook itself."""
        reduced = self._hook(state, bucket)
        if not self._initialized(bucket):
            return reduced
        if bucket.index() == 0:
            self._zero.follow_changes()  # before anything is stepped: it raises at all ranks alike
            self._overlap.restore_layout()
        self._reducing.append((bucket, reduced))
        while self._reducing and (bucket.is_last() or (self._interleaved and self._reducing[0][1].done())):
            due, future = self._reducing.popleft()
            with self._beside(due.buffer().device):
                self._step(due, future)
        if bucket.is_last():
            self._finish()
        return reduced

    def _initialized(self, bucket: dist.GradBucket) -> bool:
        """Notes DDP's buckets in the first backward pass in which they are final, and assigns them to ranks at the next
        one. Returns whether they are assigned."""
        if self._overlap.initialized:
            return True
        ddp = self._ddp()
        if ddp is None or not ddp._has_rebuilt_buckets:
            return False
        if bucket.index() == 0 and self._seen:
            self._zero.share_buckets(self._seen)
            self._seen.clear()
            return True
        self._seen.append(bucket.parameters())
        return False

    def _step(self, bucket: dist.GradBucket, reduced: Reduced) -> None:
        result = reduced.wait()
        mean = result if isinstance(result, torch.Tensor) else result[0]  # hooks in C++ give a list of one
        if mean.data_ptr() != bucket.buffer().data_ptr():
            bucket.buffer().copy_(mean)  # as DDP would after the backward pass
        for gradients in self._overlap.own_parts(bucket.index(), bucket.gradients()):
            self._zero.local_step(gradients=gradients)
        for work in self._overlap.send_bucket(bucket.index(), self._group):
            self._sending.append((bucket.buffer().device, work))

    def _finish(self) -> None:
        for device, work in self._sending:
            with self._beside(device):
                work.wait()
        self._sending.clear()
        for device, stream in self._streams.items():
            torch.accelerator.current_stream(device).wait_stream(stream)

    def _beside(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """On an accelerator a stream of its own, so that the backward pass does not wait for the reduced gradients."""
        if device.type == "cpu":
            return contextlib.nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]
