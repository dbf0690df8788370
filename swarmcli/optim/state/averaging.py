"""The averaging of training states: a round after an epoch, whose average changes the state by the delta rule.

    state ── copied ──▶ a round, beside those of the gradients ──▶ state += average − state as it was copied

A lossy codec encodes differences from the last average that all members hold, see `averaging/round/differences.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from swarmcli.averaging import AveragerCore, RoundRequest
from swarmcli.compression import CompressionBase
from swarmcli.concurrency import on_executor
from swarmcli.errors import OptimizerError
from swarmcli.events import Noticed
from swarmcli.network.identity import PeerID
from swarmcli.network.task_owner import TaskOwner
from swarmcli.optim.state.buffers import moved
from swarmcli.optim.state.replica import Replica
from swarmcli.optim.state.statistics import statistics_of

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerConfig
    from swarmcli.dht import DHTNode

# Seconds. Mates copy their states as they end the same epoch, so they come within moments. Peers of other groups may be
# at another epoch, and look for this peer later: if it waited as long for them, it would have no time for its epochs.
LONGEST_WAIT, TO_BEGIN = 5.0, 10.0  # for mates, and after that for the group of those who came to begin
WAIT_FOR_OTHER_GROUPS, TO_BEGIN_WITHOUT = 3.0, 1.0
# Torch's optimizers divide by these, or by their roots.
_SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "exp_inf", "sum"})


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor that is averaged. `find` looks it up each time, since optimizers and users replace tensors.

    If there is none, zeros stand for it, and the average changes nothing.
    """

    like: torch.Tensor  # has the shape and type
    find: Callable[[], torch.Tensor | None]
    # Whether it holds means of squares, or something else that is never negative and by which others divide. None: its
    # values decide, see `move`.
    squares: bool | None = False

    def copied(self) -> torch.Tensor:
        """A copy in host memory."""
        tensor = self.find()
        if tensor is None:
            return torch.zeros(self.like.shape, dtype=self.like.dtype)
        return tensor.detach().to("cpu", self.like.dtype, copy=True).contiguous()

    @torch.no_grad()
    def move(self, average: torch.Tensor, before: torch.Tensor | None) -> None:
        """Changes the tensor by the delta rule. `before`: what was copied; None: the tensor has not changed since."""
        tensor = self.find()
        if tensor is None:
            return
        if before is not None:
            # Batch norm's running variances have no name here, so positive values count as such. If they are means that
            # happen to be positive, the rule for squares does no harm.
            squares = bool((before > 0).all() and (tensor > 0).all()) if self.squares is None else self.squares
            average = moved(tensor.detach(), average, before, squares=squares)
        tensor.detach().copy_(average)


def state_slots(
    parameters: Sequence[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    statistics: Sequence[str],
    extra_tensors: Sequence[torch.Tensor],
) -> Iterator[Slot]:
    """The tensors of their states that the peers of a run average, in the same order at all of them.

    Tensors without floating-point numbers stay as they are: batch norm's counter of batches, for example, counts what
    this peer has computed, and neither a mean nor a maximum of it means anything. Newcomers download them.
    """
    trained = (parameter for parameter in parameters if parameter.requires_grad and parameter.is_floating_point())
    yield from (Slot(parameter, partial(_itself, parameter)) for parameter in trained)
    yield from statistic_slots(optimizer, statistics)
    for tensor in extra_tensors:
        if tensor.is_floating_point():
            yield Slot(tensor, partial(_itself, tensor), squares=None)


def statistic_slots(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> Iterator[Slot]:
    """Statistics of the optimizer by name (`exp_avg`, `momentum_buffer`, …), of the parameters that are trained.

    They have the shape of their parameter. One that the optimizer has not made yet counts as zero, as it would begin.
    `find` raises OptimizerError, which names the statistic, if the optimizer has others but not this one, or one of
    another shape. Raises ValueError if the optimizer keeps its statistics in other processes.
    """
    if names and statistics_of(optimizer).waits:
        raise ValueError(
            f"average_opt_statistics={tuple(names)!r}: {type(optimizer).__name__} shares its statistics among the "
            f"processes of a site (zero), where they cannot be averaged; leave average_opt_statistics empty, or give "
            f"the site an optimizer without zero"
        )
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        for name in dict.fromkeys(names) if parameter.requires_grad else ():
            find = partial(_statistic, optimizer, parameter, name)
            yield Slot(parameter, find, name in _SQUARES)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _statistic(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str) -> torch.Tensor | None:
    made = optimizer.state.get(parameter, {})
    if made and name not in made:
        there = ", ".join(map(str, made))
        raise OptimizerError(f"average_opt_statistics: there is no {name!r}; there are {there}")
    value = made.get(name)
    if value is None or (isinstance(value, torch.Tensor) and value.shape == parameter.shape):
        return value
    form = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise OptimizerError(
        f"average_opt_statistics: {name!r} has {form}; what can be averaged has its parameter's shape, "
        f"{tuple(parameter.shape)}"
    )


def state_config(run_id: str, gradients: AveragerConfig, compression: CompressionBase) -> AveragerConfig:
    """Returns the options of the states' averager: those of the gradients', with its own codec and all peers in one
    group.
    """
    wait = min(LONGEST_WAIT, gradients.matchmaking.min_matchmaking_time)
    # One group, since this brings together what several groups have parted.
    matchmaking = replace(gradients.matchmaking, target_group_size=None, min_matchmaking_time=wait)
    allreduce = replace(gradients.allreduce, compression=compression, tensor_infos=None)
    return replace(
        gradients, prefix=f"{run_id}_state", allreduce=allreduce, matchmaking=matchmaking, by_differences=True
    )


@dataclass(frozen=True, slots=True)
class Occasion:
    """After which epoch states are averaged, and with whom: with `mates`, and with others that have this tag."""

    tag: bytes
    epoch: int
    weight: float
    mates: tuple[PeerID, ...]
    several: bool = False  # some of the mates ended the epoch in other groups


class StateRounds:
    """Rounds that average the slots' tensors, in memory that the averager holds only while a round is under way."""

    def __init__(
        self, node: DHTNode, config: AveragerConfig, slots: Iterable[Slot], terms: Mapping[str, str] | None = None
    ) -> None:
        """Raises OptimizerError for statistics that cannot be averaged."""
        self.slots = tuple(slots)
        for slot in self.slots:
            slot.find()
        self._outline = [torch.empty(slot.like.shape, dtype=slot.like.dtype, device="meta") for slot in self.slots]
        self.averager = AveragerCore(self._outline, node, config)
        self._terms = dict(terms or {})

    async def average(self, occasion: Occasion, tensors: Sequence[torch.Tensor] | None = None) -> str:
        """One round over these tensors, which then hold the average; None: this peer is an auxiliary and has none.
        Returns why there is no average; "": there is one. If this coroutine is cancelled, this peer leaves the round;
        the others go on."""
        averager = self.averager
        wait, to_begin = averager.config.matchmaking.min_matchmaking_time, TO_BEGIN
        if occasion.several:
            wait, to_begin = min(wait, WAIT_FOR_OTHER_GROUPS), TO_BEGIN_WITHOUT
        averager.finder.memory.expect(occasion.mates)
        request = RoundRequest(
            tag=occasion.tag,
            weight=occasion.weight,
            timeout=wait + to_begin,
            lookout=wait,
            epoch=occasion.epoch,
            terms=self._terms,
        )
        await averager.take_up(tensors or self._outline)
        control = averager.begin_round(request)
        try:
            result = await control.outcome()
        finally:
            control.cancel()  # without effect if the round has ended
            await averager.take_up(self._outline)
        if isinstance(result, BaseException):
            return str(result)
        # Auxiliaries do not learn everybody's weight.
        return "" if result.total_weight > 0 or averager.config.auxiliary else "nobody in the group had samples"


@dataclass(slots=True)
class _Copies:
    """The copies of one state that is being averaged.

    averages    hold the state as it was copied, and the averages once the round has committed
    before      the state as it was copied; None: it does not change meanwhile
    generation  of the state, see Replica: a later one is another state
    """

    averages: list[torch.Tensor]
    before: list[torch.Tensor] | None
    generation: int
    committed: bool = False
    task: asyncio.Task[None] | None = None


class StateAveraging:
    """One averaging at a time: `begin` starts a round in the background, `apply` changes the state when the caller
    wants.

    A round that fails changes nothing: the event Noticed says why, and each peer goes on with its own state.
    """

    def __init__(
        self,
        node: DHTNode,
        config: AveragerConfig,
        replica: Replica,
        statistics: Sequence[str] = (),
        terms: Mapping[str, str] | None = None,
    ) -> None:
        """`config`: see `state_config`. Raises OptimizerError for statistics that cannot be averaged."""
        state = replica.state
        slots = state_slots(state.parameters, state.optimizer, statistics, state.extra_tensors)
        self._events = node.endpoint.events
        self._replica = replica
        self._rounds = StateRounds(node, config, slots, terms)
        self._tasks = TaskOwner()  # of one averaging at most
        self._copies: _Copies | None = None

    async def start(self) -> None:
        await self._rounds.averager.start()

    async def shutdown(self) -> None:
        """Leaves the round under way. Idempotent; leaves no task."""
        await self._abandon()
        await self._rounds.averager.shutdown()

    @property
    def under_way(self) -> bool:
        """Whether there is an averaging that `apply` has not finished."""
        return self._copies is not None

    async def begin(self, occasion: Occasion, *, changes: bool) -> None:
        """Begins to average the state as it is now with those of mates, and of others with this tag. Drops an earlier
        average that was never applied.

        `changes`: the state may change until `apply`. Raises OptimizerError for statistics that cannot be averaged.
        """
        await self._abandon()
        copied = await self._replica.change(lambda: [slot.copied() for slot in self._rounds.slots])
        nbytes = sum(each.nbytes for each in copied)
        before = await on_executor(nbytes, lambda: [each.clone() for each in copied]) if changes else None
        self._copies = copies = _Copies(copied, before, self._replica.generation)
        copies.task = self._tasks.spawn(self._average(occasion, copies))

    async def apply(self, *, wait: bool = False) -> bool:
        """Changes the state by the delta rule if the round has ended; with `wait` it waits for that. Returns whether an
        average has changed the state. Raises SiteError if a process that has a part of the state is gone."""
        copies = self._copies
        if copies is None or copies.task is None or not (wait or copies.task.done()):
            return False
        await asyncio.wait([copies.task])
        if copies is not self._copies:
            return False  # another call has applied it, or the state was replaced
        self._copies = None
        if not copies.committed:
            return False
        return await self._replica.change(partial(self._move, copies))

    def drop(self) -> None:
        """Drops the averaging under way, since its state is of no use any more: leaves the round; the others go on."""
        copies, self._copies = self._copies, None
        if copies is not None and copies.task is not None:
            copies.task.cancel()

    async def _abandon(self) -> None:
        self.drop()
        await self._tasks.close()

    async def _average(self, occasion: Occasion, copies: _Copies) -> None:
        reason = await self._rounds.average(occasion, copies.averages)
        copies.committed = not reason
        if reason:
            after = f"after epoch {occasion.epoch}, each peer keeps its own: {reason}"
            self._events.emit(Noticed("warning", f"the states were not averaged {after}"))

    def _move(self, copies: _Copies) -> bool:
        if copies.generation != self._replica.generation:  # checked under the lock: a download may have come first
            return False
        self._replica.placement.shift()
        for index, slot in enumerate(self._rounds.slots):
            slot.move(copies.averages[index], None if copies.before is None else copies.before[index])
        return True
