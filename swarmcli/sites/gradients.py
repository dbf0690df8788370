"""How the gradients of a site's processes become those of one peer.

If the swarm averages gradients, each rank sums its own over the epoch, and `freeze` at rank 0 adds up the sums. With
local updates the ranks' gradients are averaged in every step, and rank 0 steps with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from swarmcli.errors import OptimizerError
from swarmcli.optim.gradients.accumulator import GradientAccumulator, Weighed, sum_type
from swarmcli.sharding.transfer import PIECE, runs_of
from swarmcli.sites.commands import Command, LeaderCommands
from swarmcli.sites.links import named
from swarmcli.sites.site import Site


class GatherSums(Command, frozen=True):
    """Every rank adds its sums to rank 0's and begins anew. `void`: it drops them first."""

    void: bool


class SiteAccumulator(GradientAccumulator):
    """Rank 0's accumulator: it counts the samples of all ranks, and `freeze` fetches the others' sums.

    From then on these are part of this rank's sums, even if `restore` follows. `reset` makes the others' sums `void`,
    which they learn with the next verdict or command.
    """

    waits = True

    def __init__(self, commands: LeaderCommands, parameters: Sequence[torch.Tensor], *, reuse: bool = False) -> None:
        if reuse:
            raise ValueError("reuse_grad_buffers=True: the processes of a site need sums beside their gradients")
        super().__init__(parameters)
        self._commands = commands
        self._void = False  # whether the others have to drop what they summed before the last reset
        self._own = Weighed()  # this rank's part of the next batch
        self._elsewhere = Weighed()  # samples that are counted here and summed at other ranks

    def expect(self, own: Weighed, others: Weighed) -> Weighed:
        """Returns the batch for the optimizer's step: this rank's, and the others', which are in their sums already."""
        self._own = own
        return own if self._void else own + others

    def take_void(self) -> bool:
        """Whether the others have to drop their sums. For the verdict or command that tells them."""
        void, self._void = self._void, False
        return void

    def add(self, batch_size: int, scale: float | None = None, weight: float | None = None) -> bool:
        """Adds this rank's gradients; the others have added theirs to their own sums before they reported."""
        if scale is not None:
            raise OptimizerError("a GradScaler has no place in a site, whose processes would scale by themselves")
        own, self._own = self._own, Weighed()
        taken = not own.samples or super().add(own.samples, weight=own.weight)
        if not (own.samples and taken):
            self._make_ready()  # for the others' sums
            self.times += 1
        self._summed += Weighed.of(batch_size, weight) - own
        self._elsewhere += Weighed.of(batch_size, weight) - own
        return taken

    def freeze(self) -> Weighed:
        """As GradientAccumulator does, with the sums of all ranks. Raises SiteError. Never on the event loop."""
        if self._elsewhere.samples:
            site = self._commands.site

            def fetch() -> Weighed:
                sum_over_ranks(site, self.accumulators)
                return _total(site, Weighed())

            found = self._commands.run(GatherSums(self.take_void()), fetch)
            self._summed += found - self._elsewhere  # these are equal, unless a reset came in between
            self._elsewhere = Weighed()
        return super().freeze()

    def reset(self) -> None:
        self._void, self._elsewhere = True, Weighed()
        super().reset()


class RankSums:
    """The gradients of another rank than 0, summed over the epoch until rank 0 gathers them."""

    def __init__(self, site: Site, parameters: Sequence[torch.Tensor]) -> None:
        """`parameters`: those that are trained, in the order of rank 0's optimizer."""
        self._site, self._parameters = site, list(parameters)
        self._totals = [torch.zeros(p.shape, dtype=sum_type(p.dtype), device=p.device) for p in parameters]
        self._summed = Weighed()

    def add(self, batch: Weighed) -> None:
        """Adds the present gradients, which are means over this batch."""
        _add_weighted(self._totals, self._parameters, batch.weight)
        self._summed += batch

    def hand_over(self, command: GatherSums) -> None:
        """Sends the sums to rank 0, which is in `SiteAccumulator.freeze`."""
        if command.void:
            self.clear()
        sum_over_ranks(self._site, self._totals)
        _total(self._site, self._summed)
        self.clear()

    def clear(self) -> None:
        self._summed = Weighed()
        for total in self._totals:
            total.zero_()


def average_gradients(site: Site, parameters: Sequence[torch.Tensor], batch: Weighed, total: Weighed) -> None:
    """With local updates: sets rank 0's gradients to the weighted mean of all. All ranks call it with their batches.

    `total`: of all batches, known at rank 0. Parameters are in the order of rank 0's optimizer. Raises SiteError.
    """
    present = torch.tensor([bool(batch.weight) and p.grad is not None for p in parameters], dtype=torch.int32)
    with named("the gradients of this site did not come together"):
        dist.reduce(present, dst=0, op=dist.ReduceOp.MAX, group=site.group)
    sums = [torch.zeros(p.shape, dtype=sum_type(p.dtype), device=p.device) for p in parameters]
    _add_weighted(sums, parameters, batch.weight)
    sum_over_ranks(site, sums)
    if site.rank == 0 and total.weight:
        for used, parameter, summed in zip(present.tolist(), parameters, sums, strict=True):
            if used:
                parameter.grad = summed.div_(total.weight).to(parameter.dtype)


def sum_over_ranks(site: Site, tensors: Sequence[torch.Tensor]) -> None:
    """Adds up `tensors[i]` of all ranks in rank 0's, in place; the others' values are undefined afterwards.

    Tensors are of the same shapes and types everywhere, on any device. Raises SiteError.
    """
    contiguous = [tensor.detach().contiguous() for tensor in tensors]
    flat = [tensor.view(-1) for tensor in contiguous]
    for dtype in dict.fromkeys(each.dtype for each in flat):
        alike = [each for each in flat if each.dtype is dtype]
        for runs in runs_of([each.numel() for each in alike], PIECE // dtype.itemsize):
            parts = [alike[run.tensor][run.start : run.stop] for run in runs]
            in_place = len(parts) == 1 and parts[0].device.type == site.carrier.type
            whole = parts[0] if in_place else torch.cat([part.to(site.carrier) for part in parts])
            with named("the gradients of this site did not come together"):
                dist.reduce(whole, dst=0, group=site.group)
            if site.rank == 0 and not in_place:
                for part, total in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
                    part.copy_(total)
    for tensor, summed in zip(tensors, contiguous, strict=True):
        if site.rank == 0 and not tensor.is_contiguous():
            tensor.detach().copy_(summed)


@torch.no_grad()
def _add_weighted(sums: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], weight: float) -> None:
    for parameter, total in zip(parameters, sums, strict=True):
        if weight and parameter.grad is not None:
            total.add_(parameter.grad, alpha=weight)


def _total(site: Site, own: Weighed) -> Weighed:
    """The sum over all ranks, at rank 0."""
    counts = torch.tensor([own.samples, own.weight], dtype=torch.float64)
    with named("the samples of this site were not counted"):
        dist.reduce(counts, dst=0, group=site.group)
    return Weighed(int(counts[0]), float(counts[1]))
