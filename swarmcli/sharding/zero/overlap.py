"""The sharded step as parts of DistributedDataParallel's backward pass: one part for each of its gradient buckets.

A part is a step with the gradients of a few parameters, which are handed in. torch has *functional* variants of some of
its optimizers for that (torch.distributed.optim). But they are deprecated TorchScript; they keep their own copy of the
learning rate, so schedules have no effect; and Adagrad's updates the wrong parameters when only some have a gradient.
Here an ordinary optimizer is stepped in parts instead; for a functional class, the ordinary one of which it is a
variant.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from swarmcli.sharding.transfer import as_bytes
from swarmcli.sharding.zero.ownership import ParameterBuckets, Share, assign, share_out

logger = logging.getLogger(__name__)

# The classes whose step treats each parameter by itself, so that it may be done in parts. LBFGS's does not.
STEPPED_IN_PARTS: frozenset[type[Optimizer]] = frozenset(
    {ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop}
)
Gradients = Mapping[torch.Tensor, torch.Tensor]  # by parameter


class Overlap:
    """The parts of DDP's buckets: which rank steps each, and in which tensor it is sent.

    Nothing is decided until DDP's buckets are final, because gradients come bucket by bucket. `shard_buckets` splits
    buckets between ranks; otherwise one rank steps each.
    """

    def __init__(self, optimizer_class: Any, defaults: Mapping[str, Any], group: dist.ProcessGroup) -> None:
        """Raises ValueError for a class that cannot be stepped in parts."""
        self.initialized = False
        self.shard_buckets = False
        self._optimizer_class = functional_equivalent(optimizer_class)
        self._defaults = dict(defaults)
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._shares: list[Share] = []
        self._parameters: list[list[torch.Tensor]] = []  # of each share
        self._flat = ParameterBuckets()  # one tensor for each share

    def share(
        self, buckets: Sequence[Sequence[torch.Tensor]], parameters: Sequence[torch.Tensor], settings: Mapping[str, Any]
    ) -> tuple[list[int], FunctionalOptimizer]:
        """Assigns these buckets of parameters to ranks. Returns the owners of all `parameters`, and this rank's
        optimizer, made with these settings.

        Raises ValueError unless the buckets hold exactly the trainable parameters.
        """
        _check(list(chain.from_iterable(buckets)), parameters)
        sizes = [[parameter.nbytes for parameter in bucket] for bucket in buckets]
        self._shares = share_out(sizes, self._world_size, split=self.shard_buckets)
        self._parameters = [list(buckets[share.bucket][share.start : share.stop]) for share in self._shares]
        self._flat.lay_out(self._parameters)
        owners = self._owners(parameters)
        own = [parameter for parameter, rank in zip(parameters, owners, strict=True) if rank == self._rank]
        self.initialized = True
        return owners, FunctionalOptimizer(self._optimizer_class([{**settings, "params": own}], **self._defaults))

    def _owners(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """The owner of each parameter. Frozen ones, which are in no bucket, go to the emptiest ranks."""
        owners: dict[torch.Tensor, int] = {}
        loads = [0] * self._world_size
        for share, shared in zip(self._shares, self._parameters, strict=True):
            for parameter in shared:
                owners[parameter] = share.rank
                loads[share.rank] += parameter.nbytes
        frozen = [parameter for parameter in parameters if parameter not in owners]
        sizes = [parameter.nbytes for parameter in frozen]
        owners.update(zip(frozen, assign(sizes, loads, [1.0] * self._world_size), strict=True))
        return [owners[parameter] for parameter in parameters]

    def restore_layout(self) -> None:
        """Moves parameters back into the tensors that are sent, if they were given other memory."""
        if not self._flat.intact():
            logger.warning("parameters were given other memory than their buckets; rebuilding the buckets")
            self._flat.lay_out(self._parameters)

    def own_parts(self, bucket: int, gradients: Sequence[torch.Tensor]) -> Iterator[Gradients]:
        """The parts of a bucket that this rank steps, given all its (reduced) gradients."""
        for share, parameters in zip(self._shares, self._parameters, strict=True):
            if share.bucket == bucket and share.rank == self._rank:
                yield dict(zip(parameters, gradients[share.start : share.stop], strict=True))

    def send_bucket(self, bucket: int, group: dist.ProcessGroup) -> list[dist.Work]:
        """Starts to broadcast the bucket's parameters from the ranks that step them. Wait for each work."""
        works = []
        for index, share in enumerate(self._shares):
            if share.bucket == bucket:
                source = dist.get_global_rank(group, share.rank)
                for tensor in self._flat.of_rank(index):
                    works.append(dist.broadcast(as_bytes(tensor), src=source, group=group, async_op=True))
        return works


class FunctionalOptimizer:
    """An optimizer of one parameter group, stepped with gradients that are handed in and not with those in `.grad`.

    `state`, `param_groups` and `defaults` are the wrapped optimizer's own.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.state = optimizer.state
        self.param_groups = optimizer.param_groups
        self.defaults = optimizer.defaults

    def step(self, *, gradients: Gradients) -> None:
        """Updates these of its parameters, each by its gradient (of the same shape and type), and no others.

        Afterwards `.grad` is as it was, even if the step raises.
        """
        group = self.param_groups[0]
        everything, former = group["params"], {parameter: parameter.grad for parameter in gradients}
        group["params"] = list(gradients)
        try:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            self._optimizer.step()
        finally:
            group["params"] = everything
            for parameter, gradient_before in former.items():
                parameter.grad = gradient_before


def is_functional(optimizer_class: Any) -> bool:
    """Whether this is one of torch's functional optimizers, which hooks can step while the backward pass runs."""
    return optimizer_class in _torchs_variants().values()


def functional_equivalent(optimizer_class: Any) -> type[Optimizer]:
    """The ordinary class to wrap for `optimizer_class`, which is an ordinary one or one of torch's functional ones.

    Raises ValueError for a class that is not known to treat each parameter by itself. torch's
    `register_functional_optim` makes a class of one's own known.
    """
    variants = _torchs_variants()
    ordinary = {variant: each for each, variant in variants.items()}.get(optimizer_class, optimizer_class)
    if ordinary in STEPPED_IN_PARTS or (ordinary in variants and issubclass(ordinary, Optimizer)):
        return ordinary
    name = getattr(optimizer_class, "__name__", repr(optimizer_class))
    raise ValueError(
        f"overlap_with_ddp=True needs an optimizer with a functional variant, and {name} has none: "
        f"use one of {', '.join(sorted(each.__name__ for each in STEPPED_IN_PARTS))}, or, if yours treats each "
        "parameter by itself, make it known: torch.distributed.optim.utils.register_functional_optim(cls, cls)"
    )


def _torchs_variants() -> Mapping[Any, Any]:
    """Ordinary class → functional variant. A user who names a variant has imported them already; an import here would
    compile TorchScript for a second."""
    module = sys.modules.get("torch.distributed.optim.utils")
    return {} if module is None else module.functional_optim_map


def _check(reduced: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
    indices = {parameter: index for index, parameter in enumerate(parameters)}
    if any(parameter not in indices for parameter in reduced):
        raise ValueError(
            "DDP reduces gradients of parameters that the optimizer was not given: give it all of the model's"
        )
    trained = {index for index, parameter in enumerate(parameters) if parameter.requires_grad}
    absent = sorted(trained - {indices[parameter] for parameter in reduced})
    if absent:
        raise ValueError(
            f"parameters {absent[:10]} are trainable but not among DDP's, so the hook would never step them: give "
            "the optimizer the parameters of the wrapped model only"
        )
