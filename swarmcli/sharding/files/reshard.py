"""Optimizer state from the ranks that hold it to the ranks that will own it. Every rank computes the same plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from swarmcli.sharding.transfer import agree, exchange
from swarmcli.sharding.zero.consolidation import receive_share, send_share
from swarmcli.sharding.zero.state import State


class Move(NamedTuple):
    """The state of one parameter, from a rank that has it to one that will own it; both may be the same."""

    source: int
    target: int
    parameter: int


def plan_moves(held: Sequence[Mapping[int, int]], wanted: Sequence[Collection[int]]) -> list[Move]:
    """The moves that give each rank what it wants of what there is, ordered by source, target and parameter.

    `held`: for each rank the bytes of state by parameter index that it can give (several may hold the same);
    `wanted`: the parameters that each rank will own. A rank keeps what it has and wants. If several could send,
    the rank with the least to send so far does, the lowest one if they are equal. State that nobody holds is not moved.
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


class _Offer(msgspec.Struct, frozen=True):
    """One rank can give this, and wants that."""

    held: dict[int, int]  # bytes of state by parameter index
    wanted: list[int]


def reshard(
    held: State,
    wanted: Collection[int],
    group: dist.ProcessGroup,
    *,
    check: Callable[[Collection[int]], str | None] = lambda indices: None,
    meet: Callable[[], object] = lambda: None,
) -> dict[int, Mapping[str, Any]]:
    """The state of the parameters `wanted`, as far as any rank of the group has one. A collective call.

    `held` is what this rank can give: live tensors or views of files. Others' state arrives in CPU memory, in pieces
    of bounded size; what this rank has itself is returned as it is. `check` is called with the parameters whose state
    this rank will give, before anything moves; the problem that it names is raised as CheckpointError at all ranks.
    `meet` is called where ranks may come at very different times, by all of them: it waits for all, longer than the
    group's timeout allows.
    Raises ValueError at all ranks for state that nobody wants, which would be lost, and RuntimeError when a rank is
    gone or the group's timeout has passed.
    """
    rank = dist.get_rank(group)
    offer = _Offer({index: _nbytes(statistics) for index, statistics in held.items()}, sorted(wanted))
    offers = exchange(_Offer, offer, group)
    wanted_by_any = {index for each in offers for index in each.wanted}
    if lost := sorted({index for each in offers for index in each.held} - wanted_by_any):
        raise ValueError(f"there is state of parameters {lost[:10]}, which no rank of the new layout owns")
    moves = plan_moves([each.held for each in offers], [each.wanted for each in offers])
    problem = check([move.parameter for move in moves if move.source == rank])
    meet()
    agree(problem, group)
    return _carry_out(moves, held, group, meet)


def _carry_out(
    moves: list[Move], held: State, group: dist.ProcessGroup, meet: Callable[[], object]
) -> dict[int, Mapping[str, Any]]:
    """All ranks go through the pairs in the same order, so that no two wait for each other crosswise."""
    rank = dist.get_rank(group)
    own = {move.parameter: held[move.parameter] for move in moves if move.source == move.target == rank}
    others = [move for move in moves if move.source != move.target]
    for (source, target), pair in groupby(others, key=lambda move: (move.source, move.target)):
        indices = [move.parameter for move in pair]
        meet()
        if source == rank:
            send_share({index: held[index] for index in indices}, target, group)
        elif target == rank:
            own.update(receive_share(source, group, indices))
    return own


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_nbytes, value.values()))
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0
