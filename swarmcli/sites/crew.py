"""Crews: the groups of a hierarchy's first level, where the ranks of each step as one with a sharded optimizer.

rank 0's crew     gradients go to rank 0, whose Optimizer steps in the swarm; its SiteOptimizer orders the crew's shares
any other crew    its ranks add up their gradients among themselves, and each steps its share

A crew has a model and statistics of its own, so a site with crews is to the levels above what one with single ranks is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from swarmcli.errors import SiteError
from swarmcli.optim.gradients.accumulator import sum_type
from swarmcli.sharding.zero.consolidation import receive_share
from swarmcli.sharding.zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from swarmcli.sites.gradients import LeaderMeans, MemberMeans
from swarmcli.sites.learners import give_statistics
from swarmcli.sites.links import named
from swarmcli.sites.orders import Follower, Order, OrderDesk
from swarmcli.sites.pace import Report
from swarmcli.sites.sharded_optimizer import ShareOfOptimizer
from swarmcli.sites.site import Site


class Crew:
    """One rank's place in its crew. All ranks of the site form theirs together.

        pace    the main threads of this crew meet here
        site    rank 0's crew as a site of its own, for its SiteOptimizer and the shares of the others; else None
        desk    at rank 0: orders for that crew alone

    Use it as a context manager inside of that of the SiteLeader or SiteMember.
    """

    def __init__(self, whole: Site, size: int, pace: dist.ProcessGroup, site: Site | None) -> None:
        """For `form`."""
        self.whole, self.size, self.pace, self.site = whole, size, pace, site
        self.desk = OrderDesk(site) if site is not None and whole.rank == 0 else None
        self._follower: Follower | None = None

    @classmethod
    def form(cls, whole: Site, size: int) -> Crew:
        """Neighbours together, so many in each crew. ValueError: they do not fit; SiteError: a rank does not come."""
        if size < 2 or whole.size % size:
            raise ValueError(f"crews of {size} in a site of {whole.size}: the size must divide it, and be 2 at least")
        backend = dist.get_backend_config(whole.pace)
        own, orders = None, None
        with named("the crews of this site did not come together"):
            for first in range(0, whole.size, size):
                ranks = list(range(first, first + size))
                pace = dist.new_group(ranks, backend=backend, timeout=whole.timeout)
                if whole.rank in ranks:
                    own = pace
            orders = dist.new_group(list(range(size)), backend=backend, timeout=whole.timeout)
        if own is None:
            raise SiteError("torch.distributed gave this process no group")
        return cls(whole, size, own, cls._as_site(whole, size, own, orders) if whole.rank < size else None)

    @staticmethod
    def _as_site(whole: Site, size: int, pace: dist.ProcessGroup, orders: dist.ProcessGroup) -> Site:
        timeout = whole.timeout.total_seconds()
        return Site(whole.rank, size, pace=pace, orders=orders, timeout=timeout, device=whole.device, owns_world=False)

    # rank 0

    def take(self, parameters: Sequence[torch.Tensor], samples: int, reports: Sequence[Report]) -> int:
        """At rank 0: its gradients become the mean over the crew's samples, whose number is returned."""
        return LeaderMeans(self._led, parameters).take(samples, reports[: self.size - 1])

    def give_statistics(self, zero: ZeroRedundancyOptimizer) -> None:
        """In rank 0's crew: those of this rank's share, to the ranks with the same share in the other crews."""
        give_statistics(self.whole, range(self.whole.rank + self.size, self.whole.size, self.size), zero.local_state())

    @property
    def _led(self) -> Site:
        if self.site is None:
            raise RuntimeError(f"rank {self.whole.rank} is not in rank 0's crew")
        return self.site

    # the others

    def follow(self, handlers: Mapping[type[Order], Callable[[Any], None]]) -> None:
        """In rank 0's crew, at the other ranks: carries out the crew's orders from now on, in a thread of their own."""
        self._follower = Follower(self._led, handlers)
        self._follower.start()

    # the end

    def close(self) -> None:
        """Rank 0 lets its crew go, and the others of it wait for that. Raises SiteError."""
        if self.desk is not None:
            self.desk.close()
        if self._follower is not None:
            self._follower.join()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """After an error nobody is waited for."""
        if kind is None:
            self.close()
        elif self.site is not None:
            self.site.break_off()


class CrewLearner:
    """A rank other than 0 in a crew. `share` is its part of rank 0's SiteOptimizer, or of its own crew's optimizer."""

    in_crew = True

    def __init__(
        self,
        crew: Crew,
        share: ShareOfOptimizer | ZeroRedundancyOptimizer,
        handlers: Mapping[type[Order], Callable[[Any], None]] | None = None,
    ) -> None:
        """In rank 0's crew a ShareOfOptimizer with `site=crew.site`, and `handlers` for further orders of that crew's
        desk; elsewhere a ZeroRedundancyOptimizer with `process_group=crew.pace`."""
        self._crew = crew
        self._led = isinstance(share, ShareOfOptimizer)
        self._zero = share.zero if isinstance(share, ShareOfOptimizer) else share
        self._means = MemberMeans(crew.site, self._zero.parameters) if crew.site is not None else None
        if isinstance(share, ShareOfOptimizer):
            crew.follow({**share.handlers, **(handlers or {})})

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self._zero.param_groups

    def prepare(self, samples: int) -> None:
        if not self._led and mean_gradients(self._crew, self._zero.parameters, samples):
            with named("not every rank of the crew has stepped its share"):
                self._zero.step()

    def contribute(self, samples: int) -> None:
        if self._means is not None:
            self._means.contribute(samples)

    def take_statistics(self) -> None:
        """In rank 0's crew every rank has its own, and gives them to the other crews."""
        if self._led:
            self._crew.give_statistics(self._zero)
            return
        whole = self._crew.whole
        with named("the optimizer's statistics did not come from rank 0's crew"):
            source, own = whole.rank % self._crew.size, dist.get_rank(self._crew.pace)
            self._zero.install_state(receive_share(source, whole.pace, self._zero.indices_of(own)))


@torch.no_grad()
def mean_gradients(crew: Crew, parameters: Sequence[torch.Tensor], samples: int) -> bool:
    """At all ranks of a crew the gradients become the mean over the samples of all; False, and nothing has changed,
    without any. Raises SiteError."""
    gradients = [parameter.grad if samples else None for parameter in parameters]
    counts = torch.tensor([samples, *(int(gradient is not None) for gradient in gradients)])
    with named("the gradients of this crew did not come together"):
        dist.all_reduce(counts, group=crew.pace)
        total, *present = counts.tolist()
        if not total:
            return False
        for parameter, gradient, used in zip(parameters, gradients, present, strict=True):
            if not used:
                parameter.grad = None
                continue
            share = torch.zeros(parameter.shape, dtype=sum_type(parameter.dtype), device=crew.whole.carrier)
            if gradient is not None:
                share.add_(gradient.to(share.device), alpha=samples / total)
            dist.all_reduce(share, group=crew.pace)
            parameter.grad = share.to(parameter.device, parameter.dtype)
    return True
