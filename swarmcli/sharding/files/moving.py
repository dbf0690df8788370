"""Optimizer state from the ranks that have it to the ranks that will own it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import groupby
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from swarmcli.errors import CheckpointError, ShardingError
from swarmcli.network import wire
from swarmcli.sharding.files.exchange import agree, exchange
from swarmcli.sharding.files.layout import Move, plan_moves, unclaimed
from swarmcli.sharding.files.settings import apply_settings, describe_settings
from swarmcli.sharding.files.shard import State
from swarmcli.sharding.zero.consolidation import receive_share, send_share
from swarmcli.sharding.zero.state_tree import Node, take_apart


class ShardedOptimizer(Protocol):
    """What is asked of an optimizer whose state is spread over the ranks: ZeroRedundancyOptimizer has it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    @property
    def parameters(self) -> list[torch.Tensor]: ...
    @property
    def process_group(self) -> dist.ProcessGroup: ...
    @property
    def rank(self) -> int: ...
    def indices_of(self, rank: int) -> list[int]: ...
    def local_state(self) -> State: ...
    def install_state(self, state: State, *, copy: bool = True) -> None: ...


class _Offer(msgspec.Struct, frozen=True):
    """What one rank can give and what it wants."""

    held: dict[int, int]  # bytes of state by parameter index
    wanted: list[int]


def move_state(
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
    offers = [wire.decode(_Offer, data) for data in exchange(wire.encode(offer), group)]
    lost = unclaimed([each.held.keys() for each in offers], [each.wanted for each in offers])
    if lost:
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


def lay_out_anew(
    old: ShardedOptimizer | None, new: ShardedOptimizer | None, group: dist.ProcessGroup | None = None
) -> None:
    """Moves the state of a living job's sharded optimizer onto another layout: more or fewer ranks, other shares.

    A collective call of `group` (None: the whole world), which holds the ranks of both: a rank that joins has no
    `old`, one that leaves no `new`. Both are of the same parameters in the same order; the settings of the parameter
    groups go along, the parameters do not: give a rank that joins everyone's before. Each rank then has in `new` the
    state of what it owns there; it must not use `old` any more.

    Two ranks exchange only what changes hands, in bounded pieces, and nobody ever holds more than its two shares.
    Raises ValueError at all ranks if `new` lacks parameters that have state, and ShardingError if there is state that
    cannot be sent (of other kinds than tensors, plain values, lists, tuples and dicts); nothing has changed then.
    RuntimeError when a rank is gone. The share of a rank that has died is lost with it: load the last save instead.
    """
    place = dist.group.WORLD if group is None else group
    if place is None:
        raise ShardingError("there is no process group yet: call torch.distributed.init_process_group first")
    held = old.local_state() if old is not None else {}
    wanted = new.indices_of(new.rank) if new is not None else []
    own_settings = _Settings(describe_settings(old.param_groups) if old is not None else None)
    told = [wire.decode(_Settings, data).described for data in exchange(wire.encode(own_settings), place)]

    def check(indices: Collection[int]) -> str | None:
        try:
            take_apart({index: held[index] for index in indices}, [])
        except TypeError as error:
            return str(error)
        return None

    try:
        state = move_state(held, wanted, place, check=check)
    except CheckpointError as error:
        raise ShardingError(f"the state cannot be laid out anew: {error}") from error
    if new is not None:
        for described in [each for each in told if each is not None][:1]:
            apply_settings(new.param_groups, described)
        new.install_state(state, copy=False)


class _Settings(msgspec.Struct, frozen=True):
    described: Node | None  # None: of a rank that joins


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_nbytes, value.values()))
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0
