"""Which rank steps which parameters of DistributedDataParallel's buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """Parameters `start` to `stop` of bucket `bucket`, which `rank` steps and sends as one tensor."""

    bucket: int
    rank: int
    start: int
    stop: int


def share_out(sizes: Sequence[Sequence[int]], ranks: int, *, split: bool) -> list[Share]:
    """The shares, ordered by bucket and start; `sizes` has the bytes of each parameter of each bucket.

    Largest bucket first, each to the rank with the least so far. Whole buckets, or, with `split`, runs of parameters
    below 1/N of all bytes (a longer one is a single parameter), so that a few large buckets do not lie on a few ranks.
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
