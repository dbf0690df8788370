"""In every step the ranks of a site report to rank 0, and at its end all have the same model.

rank 0         gather_reports ──── the swarm's optimizer steps, however long that takes ──── announce
other ranks    send_report ─────────── follow: they carry out commands, and wait ────────────────▶
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import msgspec
import torch
from torch import nn

from swarmcli.optim.gradients.accumulator import Weighed
from swarmcli.sharding.transfer import broadcast_from_owners
from swarmcli.sites.commands import StepVerdict
from swarmcli.sites.links import named, receive_message, send_message
from swarmcli.sites.site import Site


class StepReport(msgspec.Struct, frozen=True):
    """What one rank computed in a step."""

    samples: int = 0  # in its gradients
    weight: float = 0.0  # of these
    losses: float = 0.0  # sum of losses, each times its weight
    rated: float = 0.0  # sum of these weights
    wants_to_stop: bool = False
    ended: bool = False  # its data has

    @property
    def weighed(self) -> Weighed:
        return Weighed(self.samples, self.weight)


def send_report(site: Site, report: StepReport) -> None:
    send_message(site.group, report, 0)


def gather_reports(site: Site, patience: timedelta | None = None) -> list[StepReport]:
    """At rank 0: the others' reports, by rank. Raises SiteError, which names the first rank that is gone or late.

    `patience`: None is the site's timeout.
    """
    return [receive_message(StepReport, site.group, rank, patience or site.timeout) for rank in site.others]


def announce(site: Site, verdict: StepVerdict) -> None:
    """At rank 0."""
    for rank in site.others:
        send_message(site.group, verdict, rank)


class SharedModel:
    """The model of a site: rank 0's parameters and buffers, and the others' copies."""

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
        """Whether a parameter was written to since all ranks had the same, by torch's version counters. True at first.

        Writes by some kernels, such as torch's fused optimizers, are not seen.
        """
        return self._equal_at != self._versions()

    @property
    def equal(self) -> bool:
        """Whether the parameters were made equal at all ranks by other means than a transfer since the last one
        (`note_equal`), and not written to again."""
        return self._equal and not self.written

    def note_equal(self) -> None:
        """All ranks now have rank 0's values of what the optimizer steps. Does nothing before the first transfer, when
        other parameters may still differ."""
        if self._equal_at is not None:
            self._equal_at, self._equal = self._versions(), True

    def transfer(self, verdict: StepVerdict) -> None:
        """Sends what the verdict announces from rank 0 to all others; all call it. Raises SiteError."""
        tensors: list[torch.Tensor] = []
        tensors += self._parameters if verdict.new_parameters else []
        tensors += self._buffers if verdict.new_buffers else []
        by_rank: Sequence[Sequence[torch.Tensor]] = [tensors, *([] for _ in self._site.others)]
        with named("the model did not get from rank 0 to the other ranks"), torch.no_grad():
            broadcast_from_owners(by_rank, self._site.group)
        self._equal = False
        if verdict.new_parameters:
            self._equal_at = self._versions()

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]
