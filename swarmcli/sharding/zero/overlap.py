"""The sharded step as parts of DistributedDataParallel's backward pass: one part for each of its gradient buckets."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from swarmcli.errors import ShardingError
from swarmcli.sharding.transfer import as_bytes
from swarmcli.sharding.zero.buckets import ParameterBuckets
from swarmcli.sharding.zero.functional import FunctionalOptimizer, functional_equivalent
from swarmcli.sharding.zero.ownership import Share, assign, share_out
from swarmcli.sharding.zero.state import settings_of

if TYPE_CHECKING:
    from swarmcli.sharding.zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer

logger = logging.getLogger(__name__)


class Overlap:
    """Who steps what of DDP's buckets, and the steps; driven by the communication hooks of `hook`.

    Nothing is decided until DDP's buckets are final: the rank that steps a parameter has to have its whole bucket's
    gradients at once. `shard_buckets` splits buckets between ranks, otherwise each is one rank's.
    """

    def __init__(
        self,
        zero: ZeroRedundancyOptimizer,
        optimizer_class: Any,
        defaults: Mapping[str, Any],
        parameters_as_bucket_view: bool,
    ) -> None:
        """Raises ValueError for a class that cannot be stepped in parts, ShardingError for several groups."""
        if len(zero.param_groups) != 1:
            raise ShardingError(
                f"overlap_with_ddp=True works with one parameter group, this optimizer has {len(zero.param_groups)}: "
                "put all parameters into one, or train without overlap"
            )
        if parameters_as_bucket_view:
            logger.warning(
                "parameters_as_bucket_view=True is ignored with overlap_with_ddp=True, which lays parameters out "
                "as DDP lays out their gradients"
            )
        self.initialized = False
        self.shard_buckets = False
        self._zero = zero
        self._optimizer_class = functional_equivalent(optimizer_class)
        self._defaults = dict(defaults)
        self._shares: list[Share] = []
        self._parameters: list[list[torch.Tensor]] = []  # of each share
        self._flat = ParameterBuckets()  # one tensor for each share

    def require_initialized(self) -> None:
        """Raises ShardingError until the hook has seen DDP's final buckets."""
        if not self.initialized:
            raise ShardingError(
                "with overlap_with_ddp=True nobody owns anything until DDP has rebuilt its buckets: register a hook of "
                "swarmcli.sharding.zero on the model, and train two iterations (three with static_graph=True) first"
            )

    def initialize(self, buckets: Sequence[Sequence[torch.Tensor]]) -> None:
        """Shares these buckets of parameters out and makes the optimizer of this rank's shares.

        Raises ValueError when they are not exactly the trainable parameters of the optimizer.
        """
        zero = self._zero
        self._check(list(chain.from_iterable(buckets)))
        sizes = [[parameter.numel() * parameter.element_size() for parameter in bucket] for bucket in buckets]
        self._shares = share_out(sizes, zero.world_size, split=self.shard_buckets)
        self._parameters = [list(buckets[share.bucket][share.start : share.stop]) for share in self._shares]
        self._flat.lay_out(self._parameters)
        owners = self._owners()
        own = [parameter for parameter, rank in zip(zero.parameters, owners, strict=True) if rank == zero.rank]
        settings = settings_of(zero.param_groups[0])  # as of now: a schedule may have changed them
        local = self._optimizer_class([{**settings, "params": own}], **self._defaults)
        zero.adopt(owners, FunctionalOptimizer(local))
        self.initialized = True

    def _check(self, reduced: Sequence[torch.Tensor]) -> None:
        indices = {parameter: index for index, parameter in enumerate(self._zero.parameters)}
        if any(parameter not in indices for parameter in reduced):
            raise ValueError(
                "DDP reduces gradients of parameters that the optimizer was not given: give it all of the model's"
            )
        trained = {index for index, parameter in enumerate(self._zero.parameters) if parameter.requires_grad}
        absent = sorted(trained - {indices[parameter] for parameter in reduced})
        if absent:
            raise ValueError(
                f"parameters {absent[:10]} are trainable but not among DDP's, so the hook would never step them: give "
                "the optimizer the parameters of the wrapped model only"
            )

    def _owners(self) -> list[int]:
        """Of all parameters; the frozen ones, of which DDP knows nothing, go to whoever has least."""
        zero = self._zero
        owners: dict[torch.Tensor, int] = {}
        loads = [0] * zero.world_size
        for share, parameters in zip(self._shares, self._parameters, strict=True):
            for parameter in parameters:
                owners[parameter] = share.rank
                loads[share.rank] += parameter.numel() * parameter.element_size()
        frozen = [parameter for parameter in zero.parameters if parameter not in owners]
        sizes = [parameter.numel() * parameter.element_size() for parameter in frozen]
        owners.update(zip(frozen, assign(sizes, loads, [1.0] * zero.world_size), strict=True))
        return [owners[parameter] for parameter in zero.parameters]

    def begin(self) -> None:
        """Before the first bucket of a backward pass: moves parameters back to where they are sent from, if need be.

        Raises ShardingError, at all ranks alike, if parameters were frozen or unfrozen since the optimizer was made.
        """
        self._zero.follow_changes()
        if not self._flat.intact():
            logger.warning("parameters were given other memory than their buckets; rebuilding the buckets")
            self._flat.lay_out(self._parameters)

    def step_bucket(self, bucket: int, gradients: Sequence[torch.Tensor]) -> None:
        """Steps this rank's parameters of the bucket, given all its (reduced) gradients."""
        for share, parameters in zip(self._shares, self._parameters, strict=True):
            if share.bucket == bucket and share.rank == self._zero.rank:
                own = gradients[share.start : share.stop]
                self._zero.local_step(gradients=dict(zip(parameters, own, strict=True)))

    def send_bucket(self, bucket: int, group: dist.ProcessGroup) -> list[dist.Work]:
        """Starts sending the parameters of the bucket from those who step them to everyone; has to be waited for."""
        works = []
        for index, share in enumerate(self._shares):
            if share.bucket == bucket:
                source = dist.get_global_rank(group, share.rank)
                for tensor in self._flat.of_rank(index):
                    works.append(dist.broadcast(as_bytes(tensor), src=source, group=group, async_op=True))
        return works
