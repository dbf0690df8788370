"""The averaging of training states: one round after an epoch, whose average comes back by the delta rule.

    state ── copied ──▶ a round, beside those of the gradients ──▶ state += average − state as it was copied

A lossy codec gets differences from the last average that all members hold, see `averaging/round/differences.py`.
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
from swarmcli.errors import OptimizerError
from swarmcli.events import Noticed
from swarmcli.network.identity import PeerID
from swarmcli.network.task_owner import TaskOwner
from swarmcli.optim.state.buffers import moved
from swarmcli.optim.state.replica import Replica
from swarmcli.optim.state.statistics import statistics_of
from swarmcli.tasks import on_executor

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerConfig
    from swarmcli.dht import DHTNode

# Seconds. Mates copy their states as they end the same epoch, so they come within moments. Those of other groups are at
# another epoch, perhaps, and look for this peer in turn: who waited as long for them had no time for its own epochs.
LONGEST_WAIT, TO_BEGIN = 5.0, 10.0  # for mates, and beyond that until the group of those who came has begun
WAIT_FOR_OTHER_GROUPS, TO_BEGIN_WITHOUT = 3.0, 1.0
# Torch's optimizers divide by these, or by their roots.
_SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "exp_inf", "sum"})


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor that is averaged: found anew each time, since optimizers and users put others in their places.

    Where there is none, zeros stand for it, and the average of it changes nothing.
    """

    like: torch.Tensor  # has the shape and type
    find: Callable[[], torch.Tensor | None]
    # Means of squares, or something else that is never negative and that others divide by. None: nobody says which.
    squares: bool | None = False

    def copied(self) -> torch.Tensor:
        """In host memory."""
        tensor = self.find()
        if tensor is None:
            return torch.zeros(self.like.shape, dtype=self.like.dtype)
        return tensor.detach().to("cpu", self.like.dtype, copy=True).contiguous()

    @torch.no_grad()
    def move(self, average: torch.Tensor, before: torch.Tensor | None) -> None:
        """As the delta rule says. `before`: what was copied; None: nothing has changed since."""
        tensor = self.find()
        if tensor is None:
            return
        if before is not None:
            # Batch norm's running variances have no name here. To means that happen to be positive the rule for
            # squares does no harm.
            squares = bool((before > 0).all() and (tensor > 0).all()) if self.squares is None else self.squares
            average = moved(tensor.detach(), average, before, squares=squares)
        tensor.detach().copy_(average)


def state_slots(
    parameters: Sequence[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    statistics: Sequence[str],
    extra_tensors: Sequence[torch.Tensor],
) -> Iterator[Slot]:
    """The tensors that the peers of a run average of their states, in the order that all of them have.

    Tensors that are no floating-point numbers are left alone: batch norm's counter of batches, for one, counts what
    this peer computed, and neither a mean nor a maximum of it means anything. Newcomers download them with the state.
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
    Finding one raises OptimizerError, which names the statistic, where the optimizer has others but not this.
    ValueError: the optimizer keeps its statistics in other processes.
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
    """Configures the states' averager: like that of the gradients, with its own codec, and all peers in one group."""
    wait = min(LONGEST_WAIT, gradients.matchmaking.min_matchmaking_time)
    # This unites what several groups part.
    matchmaking = replace(gradients.matchmaking, target_group_size=None, min_matchmaking_time=wait)
    allreduce = replace(gradients.allreduce, compression=compression, tensor_infos=None)
    return replace(
        gradients, prefix=f"{run_id}_state", allreduce=allreduce, matchmaking=matchmaking, by_differences=True
    )


@dataclass(frozen=True, slots=True)
class Occasion:
    """After which epoch states are averaged, and with whom: with `mates`, and with others of this tag."""

    tag: bytes
    epoch: int
    weight: float
    mates: tuple[PeerID, ...]
    several: bool = False  # some of the mates ended the epoch in other groups


class StateRounds:
    """Rounds of the slots' tensors, in memory that the averager has only while a round is under way."""

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
        """One round over these tensors, which hold the average afterwards; None: this peer is an auxiliary and has
        none. Why there is no average, empty if there is. A round that is cancelled here is left; the others go on."""
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
            control.cancel()  # without effect on a round that has ended
            await averager.take_up(self._outline)
        if isinstance(result, BaseException):
            return str(result)
        # Auxiliaries do not learn of everybody's weight.
        return "" if result.total_weight > 0 or averager.config.auxiliary else "nobody in the group had samples"


@dataclass(slots=True)
class _Copies:
    """One state on its way.

    averages    hold the state as it was, and the averages once the round has committed
    before      the state as it was; None: it does not change meanwhile
    generation  of the state; a later one is another state
    """

    averages: list[torch.Tensor]
    before: list[torch.Tensor] | None
    generation: int
    committed: bool = False
    task: asyncio.Task[None] | None = None


class StateAveraging:
    """One averaging at a time: `begin` returns at once, `apply` changes the state, for its caller to choose when.

    A round that fails changes nothing: the event Noticed says why, and everyone goes on with the state that he has.
    """

    def __init__(
        self,
        node: DHTNode,
        config: AveragerConfig,
        replica: Replica,
        statistics: Sequence[str] = (),
        terms: Mapping[str, str] | None = None,
    ) -> None:
        """`config` is that of the state's averager. Raises OptimizerError for statistics that cannot be averaged."""
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
        """Whether there is an averaging that `apply` has not taken in."""
        return self._copies is not None

    async def begin(self, occasion: Occasion, *, changes: bool) -> None:
        """Averages the state as it is now with that of its mates, and of others with its tag, in the background.

        `changes`: the state may change until `apply`. An average that was never applied is given up. OptimizerError:
        statistics that cannot be averaged.
        """
        await self._abandon()
        copied = await self._replica.change(lambda: [slot.copied() for slot in self._rounds.slots])
        nbytes = sum(each.nbytes for each in copied)
        before = await on_executor(nbytes, lambda: [each.clone() for each in copied]) if changes else None
        self._copies = copies = _Copies(copied, before, self._replica.generation)
        copies.task = self._tasks.spawn(self._average(occasion, copies))

    async def apply(self, *, wait: bool = False) -> bool:
        """Moves the state by the delta rule if the round has ended; with `wait`, once it has. Whether it is another
        state for an average. Raises SiteError if a process that has a part of the state is gone."""
        copies = self._copies
        if copies is None or copies.task is None or not (wait or copies.task.done()):
            return False
        await asyncio.wait([copies.task])
        if copies is not self._copies:
            return False  # another call has taken it in, or the state was replaced
        self._copies = None
        if not copies.committed:
            return False
        return await self._replica.change(partial(self._move, copies))

    def drop(self) -> None:
        """The state that is being averaged is of no use any more: leaves the round; the others go on."""
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
        if copies.generation != self._replica.generation:  # asked under the lock: a download may come before it
            return False
        self._replica.placement.shift()
        for index, slot in enumerate(self._rounds.slots):
            slot.move(copies.averages[index], None if copies.before is None else copies.before[index])
        return True
