"""Which rank keeps the optimizer state of which parameter: sorted-greedy, weighted by what each rank can hold."""

from __future__ import annotations

import math
from collections.abc import Sequence


def assign(sizes: Sequence[int], loads: list[int], weights: Sequence[float]) -> list[int]:
    """The owner of each tensor of a parameter group; `loads` (units per rank so far) grows by what was assigned.

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


def check_weights(weights: Sequence[float], world_size: int) -> list[float]:
    """The weights as floats. Raises ValueError: not one per rank, negative, not finite, or all of them zero."""
    values = [float(weight) for weight in weights]
    if len(values) != world_size:
        raise ValueError(f"shares has {len(values)} weights for {world_size} ranks: give one per rank of the group")
    for rank, value in enumerate(values):
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"the share of rank {rank} is {value}: a share is a finite number, 0 or more")
    if not any(values):
        raise ValueError("all shares are 0, so nobody could hold the optimizer's state: give one rank more than 0")
    return values
