"""Who sends what to whom when a state is laid out anew. Every rank computes the same plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class Move(NamedTuple):
    """The state of one parameter, from a rank that has it to one that will own it; both may be the same."""

    source: int
    target: int
    parameter: int


def plan_moves(held: Sequence[Mapping[int, int]], wanted: Sequence[Collection[int]]) -> list[Move]:
    """The moves that give each rank what it wants of what there is, ordered by source, target and parameter.

    `held`: for each rank the bytes of state by parameter index that it can give (several may hold the same);
    `wanted`: the parameters that each rank will own. Who has what it wants keeps it. Of several that could send, the
    one sends that has the least to send so far, the lowest of several such; what nobody holds is not moved.
    """
    holders: dict[int, list[int]] = {}
    for rank, sizes in enumerate(held):
        for index in sizes:
            holders.setdefault(index, []).append(rank)
    demands = [(index, target) for target, indices in enumerate(wanted) for index in indices if index in holders]
    size = {index: held[ranks[0]][index] for index, ranks in holders.items()}
    sent = [0] * len(held)
    moves = []
    for index, target in sorted(demands, key=lambda demand: (-size[demand[0]], demand)):
        source = target if index in held[target] else min(holders[index], key=lambda rank: (sent[rank], rank))
        if source != target:
            sent[source] += size[index]
        moves.append(Move(source, target, index))
    return sorted(moves)


def unclaimed(held: Sequence[Collection[int]], wanted: Sequence[Collection[int]]) -> list[int]:
    """What somebody holds and nobody wants: it would be lost."""
    return sorted(set().union(*held) - set().union(*wanted))


def unsupplied(expected: Collection[int], held: Sequence[Collection[int]]) -> list[int]:
    """What should be there and nobody holds."""
    return sorted(set(expected).difference(*held))
