"""Any optimizer, with its state sharded over the ranks of a process group (ZeRO stage 1, arXiv 1910.02054, §5.1)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from swarmcli.errors import ShardingError
from swarmcli.sharding.transfer import broadcast_from_owners
from swarmcli.sharding.zero.arguments import (
    check_agreement,
    check_class,
    check_parameters,
    checked_place,
    gathered_shares,
    group_of,
)
from swarmcli.sharding.zero.consolidation import consolidate
from swarmcli.sharding.zero.overlap import Overlap, is_functional
from swarmcli.sharding.zero.ownership import Ownership, ParameterBuckets
from swarmcli.sharding.zero.state import State, copy_settings, own_entries, placed, settings_of

logger = logging.getLogger(__name__)


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Steps like `optimizer_class` would, with about 1/N of its state on each of the N ranks of `process_group`.

    Every rank makes one with the same parameters in the same order and steps it when the others do. A step updates the
    parameters that this rank owns and then receives the others from their owners, so that all ranks end with the same
    parameters, those of an unsharded optimizer. The gradients must be averaged over the ranks already
    (DistributedDataParallel). `param_groups` are those of the whole model; their settings go to the local optimizer,
    `.optim`, at each step. `defaults` are passed to `optimizer_class`.

    `parameters_as_bucket_view`: the parameters of each rank become views of one long tensor per device and type, which
    is sent whole; otherwise they are sent from their own memory, short ones packed. Several devices and types at once
    are fine. `overlap_with_ddp`: the step runs inside a DistributedDataParallel communication hook (see `overlap`).
    `shares`: how much of the state this rank can hold, in a unit common to all ranks; 0: nothing. None counts as 1. The
    attribute `initialized` is torch's: whether the constructor has finished.

    If a rank dies, the others' next collective raises RuntimeError (after the group's timeout at the latest), and this
    object cannot be used any more. Raises TypeError and ValueError for arguments that cannot work; the message names
    the argument and the fix.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Any,
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        shares: float | None = None,
        **defaults: Any,
    ) -> None:
        self.initialized = False  # the base class calls add_param_group before there are owners
        check_class(optimizer_class)
        Optimizer.__init__(self, params, defaults)
        Joinable.__init__(self)
        self.parameters: list[torch.Tensor] = list(chain.from_iterable(group["params"] for group in self.param_groups))
        check_parameters(self.parameters)
        if shares is not None and overlap_with_ddp:
            raise ValueError("shares cannot be given with overlap_with_ddp=True: DDP's buckets decide who owns what")
        if is_functional(optimizer_class) and not overlap_with_ddp:
            raise ValueError(
                f"{optimizer_class.__name__} is a functional optimizer, which only overlap_with_ddp=True can use: "
                "pass the class from torch.optim"
            )
        self.process_group = group_of(process_group)
        check_agreement(self.param_groups, parameters_as_bucket_view, self.process_group)
        self.world_size = dist.get_world_size(self.process_group)
        self.rank = dist.get_rank(self.process_group)
        self.global_rank = dist.get_global_rank(self.process_group, self.rank)
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.optim: Any = None
        self.overlap: Overlap | None = None
        self._buckets = ParameterBuckets() if parameters_as_bucket_view and not overlap_with_ddp else None
        self._trainable = [parameter.requires_grad for parameter in self.parameters]
        self._ownership = Ownership(gathered_shares(shares, self.process_group))
        self._consolidated: State | None = None
        self.has_joined = False  # this rank has run out of inputs, and steps its share for the others
        if overlap_with_ddp:
            self._check_overlap()
            self.overlap = Overlap(optimizer_class, defaults, self.process_group)
        else:
            self._use(optimizer_class([self._take_on(group) for group in self.param_groups], **defaults))
            self._lay_out_buckets()
        self.initialized = True

    def _check_overlap(self) -> None:
        if len(self.param_groups) != 1:
            raise ShardingError(
                f"overlap_with_ddp=True works with one parameter group, this optimizer has {len(self.param_groups)}: "
                "put all parameters into one, or train without overlap"
            )
        if self.parameters_as_bucket_view:
            logger.warning(
                "parameters_as_bucket_view=True is ignored with overlap_with_ddp=True, which lays parameters out "
                "as DDP lays out their gradients"
            )

    @property
    def _overlap_with_ddp(self) -> NoReturn:
        """torch's communication hooks read this first. They use internals of torch's own optimizer, so this raises."""
        raise ShardingError(
            "torch's hook_with_zero_step cannot step a swarmcli.ZeroRedundancyOptimizer: register "
            "swarmcli.sharding.hook_with_zero_step (or hook_with_zero_step_interleaved), which takes the same arguments"
        )

    # Owners

    def owner_of(self, index: int) -> int:
        """The rank that keeps the state of parameter `index` (its place in `param_groups`, as in a state dict).

        Raises TypeError and ValueError for an index that no parameter has.
        """
        self._require_initialized()
        return self._ownership.owners[checked_place(index, "index", len(self.parameters), "parameter")]

    def indices_of(self, rank: int) -> list[int]:
        """The parameters whose state this rank keeps, ascending."""
        self._require_initialized()
        return self._ownership.indices_of(rank)

    def share_buckets(self, buckets: Sequence[Sequence[torch.Tensor]]) -> None:
        """With overlap, once DDP's buckets are final: assigns them to ranks and makes this rank's optimizer.

        Raises ValueError unless they hold exactly the trainable parameters of the optimizer.
        """
        assert self.overlap is not None
        settings = settings_of(self.param_groups[0])  # as of now: a schedule may have changed them
        self._ownership.owners, local = self.overlap.share(buckets, self.parameters, settings)
        self._use(local)

    def _take_on(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Assigns the group's parameters. Returns the group for the local optimizer, perhaps without parameters."""
        first = len(self._ownership.owners)
        self._ownership.take_on(group["params"])
        return {**settings_of(group), "params": self._ownership.by_rank(group["params"], first)[self.rank]}

    def _use(self, local: Any) -> None:
        self.optim = local
        self.state = local.state
        self.defaults = {**self.defaults, **getattr(local, "defaults", {})}
        copy_settings(local.param_groups, self.param_groups)

    def _require_initialized(self) -> None:
        if self.overlap is not None and not self.overlap.initialized:
            raise ShardingError(
                "with overlap_with_ddp=True nobody owns anything until DDP has rebuilt its buckets: register a hook of "
                "swarmcli.sharding.zero on the model, and train two iterations (three with static_graph=True) first"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group and assigns its parameters to ranks; earlier ones do not move. A collective call.

        Raises ShardingError with overlap, which has one group only, and TypeError or ValueError for a group that cannot
        be added, or is another one at other ranks; nothing is changed then.
        """
        if isinstance(param_group, dict) and "params" not in param_group:
            raise ValueError(
                f"a parameter group has no 'params' (only {sorted(map(str, param_group))}): each maps 'params' to its "
                "tensors"
            )
        if not self.initialized:
            super().add_param_group(param_group)
            return
        if self.overlap is not None:
            raise ShardingError(
                "with overlap_with_ddp=True there is one parameter group only, that of the constructor: "
                "name all parameters there, or train without overlap"
            )
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_parameters([*self.parameters, *group["params"]], first=len(self.parameters))
            check_agreement([group], self.parameters_as_bucket_view, self.process_group)
        except ValueError:
            self.param_groups.pop()
            raise
        self.parameters += group["params"]
        self.optim.add_param_group(self._take_on(group))
        copy_settings(self.optim.param_groups[-1:], self.param_groups[-1:])  # of older groups these are the newer ones
        self._trainable += [parameter.requires_grad for parameter in group["params"]]
        self._lay_out_buckets()

    # Stepping

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:  # type: ignore[override]
        """Steps this rank's share and receives the others'. Returns what the local optimizer's step returned.

        A collective call. The local optimizer of every rank runs `closure`; `kwargs` are passed on to its step. With
        overlap it only warns and returns None, since the hook steps. Raises RuntimeError if a rank is gone or the
        group's timeout has passed; some parameters may then be a step ahead of others.
        """
        if self.overlap is not None:
            logger.warning("step() does nothing with overlap_with_ddp=True: the hook steps; leave the call out")
            return None
        loss = self.local_step(closure=closure, **kwargs)
        self.broadcast_parameters()
        return loss

    def local_step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:
        """Steps this rank's own parameters only; `broadcast_parameters` must follow before they are used."""
        self._require_initialized()
        if not self.has_joined:
            Join.notify_join_context(self)
        self.follow_changes()
        copy_settings(self.param_groups, self.optim.param_groups)
        if closure is not None:  # some optimizers' step takes none
            kwargs["closure"] = closure
        loss: float | None = self.optim.step(**kwargs)
        copy_settings(self.optim.param_groups, self.param_groups)
        return loss

    def broadcast_parameters(self) -> None:
        """Sends this rank's parameters to all and receives the others'. A collective call; raises as `step` does."""
        if self._buckets is not None:
            by_rank = [self._buckets.of_rank(rank) for rank in range(self.world_size)]
        else:
            by_rank = self._ownership.by_rank(self.parameters)
        broadcast_from_owners(by_rank, self.process_group)

    def follow_changes(self) -> None:
        """Warns if trainability changed, which moves nothing, and if parameters left their buckets, which it rebuilds.

        Raises ShardingError for changed trainability with overlap, and for parameters added without add_param_group.
        """
        if sum(len(group["params"]) for group in self.param_groups) != len(self.parameters):
            raise ShardingError("param_groups have other parameters than before: add them with add_param_group")
        trainable = [parameter.requires_grad for parameter in self.parameters]
        if trainable != self._trainable:
            if self.overlap is not None:
                raise ShardingError(
                    "the trainable parameters changed, which overlap_with_ddp=True does not allow: "
                    "keep requires_grad as it was, or train without overlap"
                )
            logger.warning(
                "the trainable parameters changed (%d of %d are now); they lie where they lay before",
                sum(trainable),
                len(trainable),
            )
            self._trainable = trainable
        if self._buckets is not None and not self._buckets.intact():
            logger.warning("parameters were given other memory than their buckets; rebuilding the buckets")
            self._lay_out_buckets()

    def _lay_out_buckets(self) -> None:
        if self._buckets is not None:
            self._buckets.lay_out(self._ownership.by_rank(self.parameters))

    # State

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ZeroRedundancyOptimizer cannot be copied or pickled, for it is one of several ranks' and has a process "
            "group: consolidate_state_dict, and load state_dict() into another one"
        )

    def local_state(self) -> dict[int, dict[str, Any]]:
        """The live state, not a copy, of those of this rank's parameters that have any yet, by index."""
        state = self.optim.state if self.optim is not None else {}
        return {index: values for index in self.indices_of(self.rank) if (values := state.get(self.parameters[index]))}

    def install_state(self, state: Mapping[int, Mapping[str, Any]], *, copy: bool = True) -> None:
        """Makes copies of these values the whole state of this rank; a parameter that is absent has no state then.
        Without `copy` it takes tensors that are on the right device as they are: nobody else may use them then.

        Tensors go to their parameter's device, zero-dimensional ones to the CPU (except for `capturable` and `fused`
        groups). Raises ValueError, before anything changes, for a parameter of another rank.
        """
        foreign = sorted(set(state) - set(self.indices_of(self.rank)))
        if foreign:
            raise ValueError(f"state of parameters {foreign[:10]}, which rank {self.rank} does not own: see owner_of")
        groups = [group for group in self.param_groups for _ in group["params"]]
        copies = {
            self.parameters[index]: placed(dict(values), self.parameters[index], groups[index], copy=copy)
            for index, values in state.items()
        }
        self._consolidated = None
        self.optim.state.clear()
        self.optim.state.update(copies)
        self.state = self.optim.state

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Copies the whole state to CPU memory of rank `to`, whose `state_dict` then returns it. A collective call.

        Raises TypeError or ValueError for a rank that does not exist, TypeError for state that is not made of tensors
        and plain values, ShardingError (a RuntimeError) if a rank could not send or, with overlap, is not initialized
        yet, and RuntimeError if a rank is gone.
        """
        self._require_initialized()
        checked_place(to, "to", self.world_size, "rank")
        copy_settings(self.param_groups, self.optim.param_groups)
        self._consolidated = None
        whole = consolidate(self.local_state(), to, self.process_group, self._ownership.owners)
        if self.rank == to:
            self._consolidated = whole

    def state_dict(self) -> dict[str, Any]:
        """The whole optimizer's state dict as of the last `consolidate_state_dict` to this rank.

        It is what an unsharded optimizer would return; such a one, or any number of ranks, can load it. Raises
        ShardingError (a RuntimeError) if nothing was consolidated to this rank since the last load.
        """
        self._require_initialized()
        if self._consolidated is None:
            raise ShardingError(
                "the optimizer state has not been consolidated on this rank: call "
                f"consolidate_state_dict(to={self.rank}) on all ranks before"
            )
        return {**super().state_dict(), "state": dict(self._consolidated)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes this rank's share of a whole state dict (of any number of ranks, or unsharded) and all its settings.

        Does not change the dict. Raises ValueError, before anything changes, for a dict of other groups, and
        ShardingError with overlap before it is initialized.
        """
        self._require_initialized()
        own = own_entries(state_dict, self.param_groups, self.indices_of(self.rank))
        super().load_state_dict({**state_dict, "state": {}})
        self.install_state(own)
        copy_settings(self.param_groups, self.optim.param_groups)

    # Uneven inputs (torch.distributed.algorithms.Join)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """After its inputs have ended, this rank goes on stepping its share in the steps of the others.

        It does so with the gradients that it has then, as torch's optimizer does; a hook that runs earlier may set
        them, but DistributedDataParallel's does not. Options are for other hooks. Raises ShardingError with overlap
        (DDP's hook for `Join` reduces gradients without its communication hook), and for `hand_over_gradients`, which
        earlier versions had.
        """
        if kwargs.get("hand_over_gradients"):
            raise ShardingError(
                "hand_over_gradients=True: nobody hands gradients over any more. Leave it out, and a rank without "
                "inputs steps with its last gradients, as torch's optimizer does; or give all ranks as many inputs"
            )
        if self.overlap is not None:
            raise ShardingError(
                "with overlap_with_ddp=True uneven inputs cannot be joined, since DDP then leaves its communication "
                "hook out: train without overlap, or give all ranks as many inputs"
            )
        return _StepAlong(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return self.parameters[0].device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group over which the state is sharded."""
        return self.process_group


class _StepAlong(JoinHook):
    """Shadows every step of those that still have inputs, because they need this rank's share stepped and sent."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        super().__init__()
        self._optimizer = optimizer

    def main_hook(self) -> None:
        self._optimizer.has_joined = True
        self._optimizer.step()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._optimizer.has_joined = False
