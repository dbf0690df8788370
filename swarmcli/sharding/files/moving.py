"""Optimizer state from the ranks that have it to the ranks that will own it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch
import torch.distributed as dist

from swarmcli.errors import CheckpointError, ShardingError
from swarmcli.network import wire
from swarmcli.sharding.files.describing import describe
from swarmcli.sharding.files.exchange import agree, exchange
from swarmcli.sharding.files.layout import Move, plan_moves, unclaimed
from swarmcli.sharding.files.manifest import ParameterForm, form_of
from swarmcli.sharding.files.settings import apply_settings, describe_settings
from swarmcli.sharding.files.shard import State
from swarmcli.sharding.zero.consolidation import receive_share, send_share
from swarmcli.sharding.zero.state_tree import Node


@runtime_checkable
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


def require_sharded(optimizer: object, name: str) -> None:
    """Raises TypeError, by the argument's name, for an optimizer without shares."""
    if not isinstance(optimizer, ShardedOptimizer):
        kind = type(optimizer)
        raise TypeError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, which does not say what each rank holds: "
            "give a swarmcli.sharding.ZeroRedundancyOptimizer"
        )


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
    Raises ValueError at all ranks unless all optimizers have as many parameters of the same shapes and dtypes in the
    same groups, and some rank gives an `old` and some a `new`. TypeError at a rank that gives what is no sharded
    optimizer, and ShardingError at the others. ShardingError if there are state or settings that cannot be sent (of
    other kinds than tensors, numbers of 64 bits, texts, None, lists, tuples and dicts), or a rank has the very tensors
    of `old` in another order in `new`. Nothing has changed then.
    RuntimeError when a rank is gone. The share of a rank that has died is lost with it: load the last save instead.
    """
    place = dist.group.WORLD if group is None else group
    if place is None:
        raise ShardingError("there is no process group yet: call torch.distributed.init_process_group first")
    if not isinstance(place, dist.ProcessGroup):
        raise TypeError(
            f"group is a {type(place).__name__}: expected a torch.distributed.ProcessGroup, of a member of it"
        )
    settings = _agreed_settings(old, new, place)
    held = old.local_state() if old is not None else {}
    wanted = new.indices_of(new.rank) if new is not None else []

    def check(indices: Collection[int]) -> str | None:
        try:
            for index in indices:
                describe(dict.fromkeys(held[index]), [], f"state[{index}]")
                for name, value in held[index].items():
                    describe(value, [], f"state[{index}][{name!r}]")
        except TypeError as error:
            return str(error)
        return None

    try:
        state = move_state(held, wanted, place, check=check)
    except CheckpointError as error:
        raise ShardingError(f"the state cannot be laid out anew: {error}") from error
    if new is not None:
        apply_settings(new.param_groups, settings)
        new.install_state(state, copy=False)


class _Layout(msgspec.Struct, frozen=True):
    """What must be the same in all optimizers."""

    group_sizes: list[int]
    parameters: list[ParameterForm]


class _Introduction(msgspec.Struct, frozen=True):
    """What one rank gives."""

    old: _Layout | None = None
    new: _Layout | None = None
    settings: Node | None = None  # of the old one
    problem: str = ""


def _agreed_settings(old: ShardedOptimizer | None, new: ShardedOptimizer | None, group: dist.ProcessGroup) -> Node:
    """The settings of the first old optimizer, when all are of the same parameters. A collective call."""
    wrong = None
    try:
        own = _introduce(old, new)
    except ShardingError as error:
        own = _Introduction(problem=str(error))
    except TypeError as error:
        own, wrong = _Introduction(problem=str(error)), error
    told = [wire.decode(_Introduction, data) for data in exchange(wire.encode(own), group)]
    if wrong is not None:
        raise wrong
    problems = [f"rank {rank}: {each.problem}" for rank, each in enumerate(told) if each.problem]
    if problems:
        raise ShardingError(f"the state cannot be laid out anew: {'; '.join(problems[:10])}")
    _check_alike(told)
    return next(each.settings for each in told if each.settings is not None)


def _introduce(old: ShardedOptimizer | None, new: ShardedOptimizer | None) -> _Introduction:
    for name, optimizer in (("old", old), ("new", new)):
        if optimizer is not None:
            require_sharded(optimizer, name)
    try:
        settings = describe_settings(old.param_groups) if old is not None else None
    except TypeError as error:
        raise ShardingError(str(error)) from error
    if old is not None and new is not None:
        _check_order(old.parameters, new.parameters)
    return _Introduction(_layout(old), _layout(new), settings)


def _check_order(old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
    """Raises ShardingError where the same tensors are in another order, which shapes alone may not show."""
    places = {id(parameter): index for index, parameter in enumerate(old)}
    for index, parameter in enumerate(new):
        place = places.get(id(parameter), index)
        if place != index:
            raise ShardingError(
                f"parameter {place} of `old` is parameter {index} of `new`: give them in the same order"
            )


def _layout(optimizer: ShardedOptimizer | None) -> _Layout | None:
    if optimizer is None:
        return None
    return _Layout(
        [len(group["params"]) for group in optimizer.param_groups], [form_of(each) for each in optimizer.parameters]
    )


def _check_alike(told: Sequence[_Introduction]) -> None:
    """Raises ValueError unless there is an old and a new optimizer, and all are of the same parameters."""
    old = [(f"rank {rank}'s `old`", each.old) for rank, each in enumerate(told) if each.old is not None]
    new = [(f"rank {rank}'s `new`", each.new) for rank, each in enumerate(told) if each.new is not None]
    if not old or not new:
        raise ValueError(f"every rank gave {'new' if old else 'old'}=None: there is nothing to lay out")
    (first, expected), *others = old + new
    for name, layout in others:
        if layout != expected:
            raise ValueError(f"{name} is of other parameters than {first}: {_difference(layout, expected)}")


def _difference(found: _Layout, expected: _Layout) -> str:
    if found.group_sizes != expected.group_sizes:
        return f"groups with {found.group_sizes} parameters, not {expected.group_sizes}"
    pairs = zip(found.parameters, expected.parameters, strict=True)
    index, (own, other) = next((index, pair) for index, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"parameter {index} is {own.dtype} {tuple(own.shape)}, not {other.dtype} {tuple(other.shape)}"


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_nbytes, value.values()))
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0
