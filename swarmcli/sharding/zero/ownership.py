"""Which rank keeps and steps which parameter, and in which tensors a rank's parameters are sent. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


class Ownership:
    """The owner of every parameter, by index. Parameters that come later are assigned without moving earlier ones."""

    def __init__(self, weights: Sequence[float]) -> None:
        """`weights`: for each rank, the part of the bytes that it should take, in any unit."""
        self.owners: list[int] = []
        self._weights = list(weights)
        self._loads = [0] * len(self._weights)  # bytes of parameters

    def take_on(self, parameters: Sequence[torch.Tensor]) -> None:
        """Assigns the parameters of one more group."""
        self.owners += assign([parameter.nbytes for parameter in parameters], self._loads, self._weights)

    def indices_of(self, rank: int) -> list[int]:
        """The indices that the rank owns, ascending."""
        return [index for index, owner in enumerate(self.owners) if owner == rank]

    def by_rank(self, parameters: Sequence[torch.Tensor], first: int = 0) -> list[list[torch.Tensor]]:
        """These parameters, whose indices begin with `first`, by the ranks that own them."""
        shares: list[list[torch.Tensor]] = [[] for _ in self._weights]
        for index, parameter in enumerate(parameters, start=first):
            shares[self.owners[index]].append(parameter)
        return shares


def assign(sizes: Sequence[int], loads: list[int], weights: Sequence[float]) -> list[int]:
    """The owner of each tensor of a parameter group. `loads` (bytes of each rank so far) grows by what is assigned.

    Largest first, each to the rank that would then be least full for its weight: (load + size) / weight. With equal
    weights that is the emptiest rank, the lowest one of several. Ranks of weight 0 get nothing. With W the sum of the
    weights and m the ranks of positive weight, no rank holds more than weight · (total + (m − 1) · largest) / W
    (the bound of list scheduling on machines of several speeds).

    Groups are assigned one after the other, so that a group added later moves nothing that was assigned before.
    """
    ranks = [rank for rank, weight in enumerate(weights) if weight > 0]
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size = sizes[index]
        owner = min(ranks, key=lambda rank: (loads[rank] + size) / weights[rank])
        loads[owner] += size
        owners[index] = owner
    return owners


class ParameterBuckets:
    """For each rank, one long tensor per device and type, of which its parameters are views.

    Parameters that are frozen when they are first laid out stay tensors of their own; they are sent too, because an
    optimizer steps whatever has a gradient. Freezing or unfreezing later moves nothing: otherwise ranks that froze
    different parameters would send and expect different tensors.
    """

    def __init__(self) -> None:
        self._sent: list[list[torch.Tensor]] = []  # by rank
        self._views: dict[torch.Tensor, torch.Tensor] = {}
        self._apart: set[torch.Tensor] = set()

    def of_rank(self, rank: int) -> list[torch.Tensor]:
        """The tensors that hold this rank's parameters."""
        return self._sent[rank]

    def intact(self) -> bool:
        """Whether the parameters are still views of the buckets. `model.half()` for example gives them other memory."""
        return all(parameter.data_ptr() == view.data_ptr() for parameter, view in self._views.items())

    def lay_out(self, parameters_by_rank: Sequence[Sequence[torch.Tensor]]) -> None:
        """Moves the values into new buckets. Parameters that are frozen and were never in one stay apart."""
        everything = [parameter for parameters in parameters_by_rank for parameter in parameters]
        self._apart |= {each for each in everything if not each.requires_grad and each not in self._views}
        self._views = {}
        self._sent = [self._lay_out_rank(parameters) for parameters in parameters_by_rank]

    def _lay_out_rank(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for parameter in parameters:
            if parameter not in self._apart:
                kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        return [
            *(self._bucket(alike) for alike in kinds.values()),
            *(each for each in parameters if each in self._apart),
        ]

    def _bucket(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        sizes = [parameter.numel() for parameter in parameters]
        bucket = torch.empty(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        for parameter, part in zip(parameters, bucket.split(sizes), strict=True):
            view = part.view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            self._views[parameter] = view
        return bucket


# Buckets of DistributedDataParallel


@dataclass(frozen=True)
class Share:
    """Parameters `start` to `stop` of bucket `bucket`, which `rank` steps and sends as one tensor."""

    bucket: int
    rank: int
    start: int
    stop: int


def share_out(sizes: Sequence[Sequence[int]], ranks: int, *, split: bool) -> list[Share]:
    """The shares, ordered by bucket and start; `sizes` has the bytes of each parameter of each bucket.

    Largest bucket first, each to the rank with the fewest bytes so far. Without `split` whole buckets; with it runs of
    parameters below 1/N of all bytes (or of a single larger parameter), so that a few large buckets do not lie on a few
    ranks.
    """
    loads = [0] * ranks
    limit = sum(map(sum, sizes)) / ranks if split else float("inf")
    shares: list[Share] = []
    for bucket in sorted(range(len(sizes)), key=lambda bucket: -sum(sizes[bucket])):
        for start, stop in _runs(sizes[bucket], limit):
            rank = min(range(ranks), key=lambda rank: loads[rank])
            loads[rank] += sum(sizes[bucket][start:stop])
            shares.append(Share(bucket, rank, start, stop))
    return sorted(shares, key=lambda share: (share.bucket, share.start))


def _runs(sizes: Sequence[int], limit: float) -> list[tuple[int, int]]:
    """Cuts before each parameter with which the run would reach the limit."""
    runs, start, filled = [], 0, 0
    for index, size in enumerate(sizes):
        if index > start and filled + size >= limit:
            runs.append((start, index))
            start, filled = index, 0
        filled += size
    return [*runs, (start, len(sizes))]
