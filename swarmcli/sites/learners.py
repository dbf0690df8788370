"""How a rank of a site steps the model that it learns with by itself, and how it comes by rank 0's statistics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from swarmcli.optim.grad_scaler import all_finite
from swarmcli.sharding.zero.consolidation import receive_share, send_share
from swarmcli.sites.links import named
from swarmcli.sites.site import Site


class Learner(Protocol):
    """For the main thread of a rank other than 0."""

    in_crew: bool  # whether the ranks of its group at the first level step as one

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of its optimizer, live; other objects after `take_statistics`."""

    def prepare(self, samples: int) -> None:
        """Steps with the present gradients, means over so many samples, unless rank 0 steps for it."""

    def contribute(self, samples: int) -> None:
        """Gives rank 0 the gradients that it steps with for this rank."""

    def take_statistics(self) -> None:
        """Rank 0's, or what they are of its share, in place of the own. Raises SiteError."""


class LoneLearner:
    """Steps by itself, with an optimizer of its own."""

    in_crew = False

    def __init__(self, site: Site, optimizer: torch.optim.Optimizer) -> None:
        self._site, self._optimizer = site, optimizer

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def prepare(self, samples: int) -> None:
        gradients = (p.grad for group in self.groups for p in group["params"] if p.grad is not None)
        if samples and all_finite(gradients):
            self._optimizer.step()

    def contribute(self, samples: int) -> None:
        """The step is taken; rank 0 takes what it has learned when the swarm wants it."""

    def take_statistics(self) -> None:
        count = sum(len(group["params"]) for group in self.groups)
        with named("rank 0 did not send the optimizer's statistics"):
            statistics = receive_share(0, self._site.pace, range(count))
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": statistics})


def give_statistics(site: Site, ranks: Iterable[int], state: Mapping[int, Mapping[str, Any]]) -> None:
    """An optimizer's state by parameter index, to other ranks of the site. Raises SiteError."""
    for rank in ranks:
        with named(f"rank {rank} did not take the optimizer's statistics"):
            send_share(state, rank, site.pace)
