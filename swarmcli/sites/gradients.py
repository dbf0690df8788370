"""How the gradients of a site's processes become those of one peer.

Where gradients are averaged in the swarm, each rank sums its own over the epoch; only when rank 0 freezes are the sums
added up there. With local updates the ranks' gradients are averaged in every step, and rank 0 steps with them.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from swarmcli.errors import OptimizerError
from swarmcli.optim.gradients.accumulator import GradientAccumulator, Weighed, sum_type
from swarmcli.sharding.transfer import SIZES, runs_of
from swarmcli.sites.commands import Command, LeaderCommands
from swarmcli.sites.links import named
from swarmcli.sites.site import Site
from swarmcli.sites.step_sync import StepReport, StepVerdict


class LeaderGradients(ABC):
    """Rank 0's side. In each step: `take`, the optimizer's step, the verdict, `finish`."""

    @property
    def generation(self) -> int:
        """The generation of the others' sums that count."""
        return 0

    @abstractmethod
    def take(self, own: Weighed, reports: Sequence[StepReport]) -> Weighed:
        """The optimizer is to step with this: this rank's batch and, by their reports, the others'."""

    @abstractmethod
    def are_news(self, *, new_epoch: bool, stepped: bool, written: bool) -> bool:
        """Whether rank 0's parameters are to be those of all ranks now.

        `stepped`: the optimizer was given samples; `written`: by what tensors tell, their values have changed. Kernels
        such as torch's fused optimizers do not let them tell.
        """

    def finish(self, verdict: StepVerdict) -> None:
        """The step is over, and all ranks know the verdict."""
        return None


class MemberGradients:
    """Another rank's side. In each step: `prepare`, its report, `contribute`, the verdict, `finish`."""

    generation = 0  # of the sums that its gradients are added to

    @property
    def handlers(self) -> Mapping[type[Command], Callable[[Any], None]]:
        """For this rank's Follower."""
        return {}

    def prepare(self, batch: Weighed) -> None:
        """Before rank 0 may count on this rank's present gradients, means over this batch."""

    def contribute(self, batch: Weighed) -> None:
        """After it knows of them."""

    def finish(self, verdict: StepVerdict) -> None:
        """The step is over."""


class GatherGradients(Command, frozen=True):
    """Every rank adds its sums to rank 0's and begins anew. Sums of another generation count nothing."""

    generation: int


class SiteAccumulator(GradientAccumulator):
    """Rank 0's: it counts the samples of all ranks, and `freeze` fetches the sums of the others.

    From then on, also if they are restored, they are in this rank's. A `reset` voids theirs by beginning another
    generation, which they learn of with the next verdict or command.
    """

    waits = True

    def __init__(self, commands: LeaderCommands, parameters: Sequence[torch.Tensor], *, reuse: bool = False) -> None:
        if reuse:
            raise ValueError("reuse_grad_buffers=True: the processes of a site need sums beside their gradients")
        super().__init__(parameters)
        self._commands = commands
        self.generation = 0
        self._own = Weighed()  # of the batch that comes next, at this rank
        self._elsewhere = Weighed()  # counted here and summed at other ranks

    def expect(self, own: Weighed) -> None:
        """Says what of the batch that is added next is this rank's."""
        self._own = own

    def add(self, batch_size: int, scale: float | None = None, weight: float | None = None) -> bool:
        """Takes in this rank's gradients; the others have added theirs to their own sums before they reported."""
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

            def fetch() -> Weighed:
                sum_over_ranks(site, site.commands, self.accumulators)
                return _total(site.commands, Weighed())

            site = self._commands.site
            found = self._commands.run(GatherGradients(self.generation), fetch)
            self._summed += found - self._elsewhere  # equal, unless a reset came between
            self._elsewhere = Weighed()
        return super().freeze()

    def reset(self) -> None:
        self.generation += 1
        self._elsewhere = Weighed()
        super().reset()


class LeaderSums(LeaderGradients):
    """LeaderGradients where rank 0 sums and averages over epochs. `make_accumulator` is for its SiteHooks."""

    def __init__(self, commands: LeaderCommands) -> None:
        self._commands = commands
        self._sums: SiteAccumulator | None = None

    def make_accumulator(self, parameters: Sequence[torch.Tensor], *, reuse: bool) -> SiteAccumulator:
        """Makes the sums of the gradients of these parameters, in the site. An AccumulatorFactory."""
        self._sums = SiteAccumulator(self._commands, parameters, reuse=reuse)
        return self._sums

    @property
    def sums(self) -> SiteAccumulator:
        if self._sums is None:
            raise RuntimeError("the Optimizer was made without these hooks (SiteHooks), or with local updates")
        return self._sums

    @property
    def generation(self) -> int:
        return self.sums.generation

    def take(self, own: Weighed, reports: Sequence[StepReport]) -> Weighed:
        self.sums.expect(own)
        return sum((each.weighed for each in reports if each.generation == self.generation), own)

    def are_news(self, *, new_epoch: bool, stepped: bool, written: bool) -> bool:
        return new_epoch or written


class MemberSums(MemberGradients):
    """MemberGradients that are summed over the epoch, until rank 0 wants them."""

    def __init__(self, site: Site, parameters: Sequence[torch.Tensor]) -> None:
        """`parameters`: those that are trained, in the order in which rank 0's optimizer has them."""
        self._site = site
        self._parameters = list(parameters)
        self._totals = [torch.zeros(p.shape, dtype=sum_type(p.dtype), device=p.device) for p in parameters]
        self._summed = Weighed()
        self._lock = threading.Lock()  # the main thread adds, the Follower hands over

    @property
    def handlers(self) -> Mapping[type[Command], Callable[[Any], None]]:
        return {GatherGradients: self._hand_over}

    @torch.no_grad()
    def prepare(self, batch: Weighed) -> None:
        with self._lock:
            for parameter, total in zip(self._parameters, self._totals, strict=True):
                if batch.weight and parameter.grad is not None:
                    total.add_(parameter.grad, alpha=batch.weight)
            self._summed += batch

    def finish(self, verdict: StepVerdict) -> None:
        with self._lock:
            self._follow(verdict.generation)

    def _hand_over(self, command: GatherGradients) -> None:
        with self._lock:
            self._follow(command.generation)
            sum_over_ranks(self._site, self._site.commands, self._totals)
            _total(self._site.commands, self._summed)
            self._clear()

    def _follow(self, generation: int) -> None:
        if generation != self.generation:
            self.generation = generation
            self._clear()

    def _clear(self) -> None:
        self._summed = Weighed()
        for total in self._totals:
            total.zero_()


class LeaderMeans(LeaderGradients):
    """LeaderGradients with local updates: rank 0's become the weighted mean of all, in every step."""

    def __init__(self, site: Site, parameters: Sequence[torch.Tensor]) -> None:
        """`parameters`: those that are trained, in the order of the optimizer."""
        self._site, self._parameters = site, list(parameters)

    def take(self, own: Weighed, reports: Sequence[StepReport]) -> Weighed:
        total = sum((each.weighed for each in reports), own)
        present, sums = _weighted_gradients(self._site, self._parameters, own.weight)
        for used, parameter, summed in zip(present, self._parameters, sums, strict=True):
            if used and total.weight:
                parameter.grad = summed.div_(total.weight).to(parameter.dtype)
        return total

    def are_news(self, *, new_epoch: bool, stepped: bool, written: bool) -> bool:
        return new_epoch or stepped or written


class MemberMeans(MemberGradients):
    """MemberGradients with local updates: rank 0 gets them in every step."""

    def __init__(self, site: Site, parameters: Sequence[torch.Tensor]) -> None:
        self._site, self._parameters = site, list(parameters)

    def contribute(self, batch: Weighed) -> None:
        _weighted_gradients(self._site, self._parameters, batch.weight)


def sum_over_ranks(site: Site, group: dist.ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
    """Adds up `tensors[i]` of all ranks in rank 0's, in place; the others' are of no use afterwards.

    Tensors are of the same shapes and types everywhere, on any device. Raises SiteError.
    """
    contiguous = [tensor.detach().contiguous() for tensor in tensors]
    flat = [tensor.view(-1) for tensor in contiguous]
    for dtype in dict.fromkeys(each.dtype for each in flat):
        alike = [each for each in flat if each.dtype is dtype]
        for runs in runs_of([each.numel() for each in alike], SIZES.piece // dtype.itemsize):
            parts = [alike[run.tensor][run.start : run.stop] for run in runs]
            in_place = len(parts) == 1 and parts[0].device.type == site.carrier.type
            whole = parts[0] if in_place else torch.cat([part.to(site.carrier) for part in parts])
            with named("the gradients of this site did not come together"):
                dist.reduce(whole, dst=0, group=group)
            if site.rank == 0 and not in_place:
                for part, total in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
                    part.copy_(total)
    for tensor, summed in zip(tensors, contiguous, strict=True):
        if site.rank == 0 and not tensor.is_contiguous():
            tensor.detach().copy_(summed)


def _total(group: dist.ProcessGroup, own: Weighed) -> Weighed:
    """The sum over all ranks, at rank 0."""
    counts = torch.tensor([own.samples, own.weight], dtype=torch.float64)
    with named("the samples of this site were not counted"):
        dist.reduce(counts, dst=0, group=group)
    return Weighed(int(counts[0]), float(counts[1]))


@torch.no_grad()
def _weighted_gradients(
    site: Site, parameters: Sequence[torch.Tensor], weight: float
) -> tuple[list[bool], list[torch.Tensor]]:
    """At rank 0: which parameters have a gradient at any rank, and the sums of weight · gradient over the ranks."""
    gradients = [parameter.grad if weight else None for parameter in parameters]
    present = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.int32)
    with named("the gradients of this site did not come together"):
        dist.reduce(present, dst=0, op=dist.ReduceOp.MAX, group=site.pace)
    sums = [torch.zeros(p.shape, dtype=sum_type(p.dtype), device=p.device) for p in parameters]
    for total, gradient in zip(sums, gradients, strict=True):
        if gradient is not None:
            total.add_(gradient, alpha=weight)
    sum_over_ranks(site, site.pace, sums)
    return [bool(each) for each in present], sums
