"""StepSync: the main threads of a site meet here in every step. All take the same steps, and end after the same one.

rank 0         gather ──── the swarm's optimizer steps, however long that takes ──── announce
other ranks    report ───────────────────────── wait ─────────────────────────────── verdict
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta

import torch
from torch import nn

from swarmcli.sharding.transfer import broadcast_from_owners
from swarmcli.sites.links import named, receive_numbers, send_numbers
from swarmcli.sites.site import Site


@dataclass(frozen=True)
class Report:
    """What one rank says of its step."""

    samples: int = 0  # in its gradients
    losses: float = 0.0  # sum over the `rated` samples of which there is a loss
    rated: int = 0
    wants_to_stop: bool = False
    ended: bool = False  # its data has
    generation: int = 0  # of the sums that its gradients were added to


@dataclass(frozen=True)
class Verdict:
    """What rank 0 says of a step, when it is over for the swarm."""

    epoch: int
    new_parameters: bool = False  # they follow
    new_buffers: bool = False  # likewise
    stop: bool = False
    generation: int = 0  # sums of gradients of another one are worth nothing


class StepSync:
    """The small messages of a step, from everyone to rank 0 and back. For main threads."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def gather(self, patience: timedelta | None = None) -> list[Report]:
        """At rank 0: the others' reports, by rank. Raises SiteError, which names the first rank that is gone or late.

        `patience`: None is the site's timeout.
        """
        return [self._report_of(rank, patience or self._site.timeout) for rank in self._site.others]

    def _report_of(self, rank: int, patience: timedelta) -> Report:
        numbers = torch.empty(len(astuple(Report())), dtype=torch.float64)
        receive_numbers(self._site.pace, [numbers], rank, patience)
        samples, losses, rated, wants_to_stop, ended, generation = numbers.tolist()
        return Report(int(samples), losses, int(rated), bool(wants_to_stop), bool(ended), int(generation))

    def report(self, report: Report) -> None:
        send_numbers(self._site.pace, [torch.tensor(astuple(report), dtype=torch.float64)], 0)

    def announce(self, verdict: Verdict) -> None:
        for rank in self._site.others:
            send_numbers(self._site.pace, [torch.tensor(astuple(verdict), dtype=torch.int64)], rank)

    def verdict(self) -> Verdict:
        """Waits for it as long as rank 0 lives: what that waits for, in the swarm, has bounds of its own."""
        numbers = torch.empty(len(astuple(Verdict(0))), dtype=torch.int64)
        receive_numbers(self._site.pace, [numbers], 0)
        epoch, new_parameters, new_buffers, stop, generation = numbers.tolist()
        return Verdict(epoch, bool(new_parameters), bool(new_buffers), bool(stop), generation)


class SharedModel:
    """The model of a site: rank 0's parameters and buffers, of which the others hold copies."""

    def __init__(self, site: Site, model: nn.Module) -> None:
        self._site = site
        self._parameters = list(model.parameters())
        self._buffers = list(model.buffers())
        self._equal_at: list[int] | None = None  # versions of the parameters when all ranks had the same
        self._equal = False

    @property
    def has_buffers(self) -> bool:
        return bool(self._buffers)

    @property
    def written(self) -> bool:
        """Whether parameters were written to since all ranks had the same, as far as they tell; at first they were."""
        return self._equal_at != self._versions()

    @property
    def equal(self) -> bool:
        """Whether they have been made equal at all ranks since the last transfer, and not been written to again."""
        return self._equal and not self.written

    def note_equal(self) -> None:
        """What the optimizer steps is rank 0's at all ranks now; before the first transfer the rest may not be."""
        if self._equal_at is not None:
            self._equal_at, self._equal = self._versions(), True

    def transfer(self, verdict: Verdict) -> None:
        """What the verdict announces, from rank 0 to all others; all call it. Raises SiteError."""
        tensors: list[torch.Tensor] = []
        tensors += self._parameters if verdict.new_parameters else []
        tensors += self._buffers if verdict.new_buffers else []
        by_rank: Sequence[Sequence[torch.Tensor]] = [tensors, *([] for _ in self._site.others)]
        with named("the model did not get from rank 0 to the other ranks"), torch.no_grad():
            broadcast_from_owners(by_rank, self._site.pace)
        self._equal = False
        if verdict.new_parameters:
            self._equal_at = self._versions()

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]
