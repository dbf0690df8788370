"""Averaging within the groups of a swarm, with the peers that are there. Coroutines of one event loop."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from statistics import median_high
from typing import Any, TypeAlias

import torch

from swarmcli.averaging import AveragerCore, RoundRequest, RoundResult
from swarmcli.averaging.shell import CoreRunner
from swarmcli.compression.base import all_finite
from swarmcli.errors import (
    AveragingError,
    CallRefused,
    DHTError,
    NetworkError,
    RoundFailed,
    StateDownloadError,
)
from swarmcli.network.loop_thread import offload
from swarmcli.sharding.levels.plan import NOTHING, LevelAverage, LevelPlan, outline
from swarmcli.sharding.levels.swarm_groups import EVERYONE, SwarmGroups
from swarmcli.state.sharing import StateOffer

MAX_STEP = 1 << 40  # of another peer that is believed
TRIES = 3  # a group whose members die in the middle of a round is formed again without them
SHUTDOWN_SECONDS = 5.0  # to leave all groups

Signature: TypeAlias = list[tuple[torch.Size, torch.dtype]]

logger = logging.getLogger(__name__)


class SwarmLevels:
    """Has one averager for each level, under a key of its own. They share one copy of the parameters in host memory.

    Rounds average the copy, and newcomers download it, so the parameters themselves are free for training at any time
    but inside `average`, and change only after a round has committed.
    """

    def __init__(self, groups: SwarmGroups, plan: LevelPlan) -> None:
        """Raises ValueError and TypeError for groups that make no sense. Takes no part in anything yet."""
        if any(size == 1 for size in plan.group_sizes):
            raise ValueError(
                "period_group_size_dict has groups of 1; a group of a swarm has at least 2 members, or None"
            )
        self._groups, self._plan = groups, plan
        self._names = groups.names(plan)
        self._configs = groups.configs(plan)
        self._averagers: list[AveragerCore] = []
        self._copies: list[torch.Tensor] = []
        self._which = ""  # outline of the parameters that the copies are of
        self._state_step = -1  # the step of the copies; -1: they hold nothing that others should begin with
        self._behind = False  # others were ahead when this peer came, and it has not averaged with them yet

    async def take_step(
        self, tensors: Sequence[torch.Tensor], step: int, places: Sequence[int]
    ) -> tuple[int, LevelAverage | None]:
        """As in ProcessGroupLevels. A peer that is behind goes on from the step of most others, so that the same level
        is due: two peers a step apart could look for each other at different levels forever.
        """
        if tensors and step >= self._plan.warmup_steps:
            await self._fit(tensors, places)
            step = await self._present_step(step)
            self._tell(step)
        level = self._plan.due(step)
        if level is None:
            return step + 1, None
        average = await self.average(level, tensors, step, places)
        self._tell(average.step + 1)  # at which a peer that came too late for this average finds this one
        return average.step + 1, average

    async def average(
        self, level: int, tensors: Sequence[torch.Tensor], step: int, places: Sequence[int]
    ) -> LevelAverage:
        """One round with those of this level's group that look for one now. Their tensors have the same shapes, types
        and places, in the same order.

        A round that fails leaves the tensors as they are, and the result, an event and the log say why. Raises
        FingerprintError if the others average other tensors.
        """
        group = self._names[level] or EVERYONE
        if not tensors:
            return LevelAverage(step, level, group, 0, NOTHING)
        await self._fit(tensors, places)
        async with self._at_rest():
            await offload(_copy, tensors, self._copies)
            if not self._behind:
                self._state_step = step
        self._tell(step)
        try:
            result = await self._round(self._averagers[level], step)
        except AveragingError as error:
            logger.warning("step %d: no average with %s: %s", step, group, error)
            return LevelAverage(step, level, group, 0, str(error))
        if result.total_weight == 0:
            return LevelAverage(step, level, group, 0, "nobody in the group had parameters that can be averaged")
        agreed = _most(step, [_read_step(told) for told in result.values()])
        async with self._at_rest():
            await offload(_copy, self._copies, tensors)
            self._state_step, self._behind = agreed, False
        return LevelAverage(agreed, level, group, len(result.contributors))

    async def download(
        self, tensors: Sequence[torch.Tensor], timeout: float | None, places: Sequence[int]
    ) -> int | None:
        """Replaces the tensors by those that others have averaged last. Returns the step of these.

        None (logged) if nobody gave any, or those that came do not fit; the tensors are then as they were.
        """
        await self._fit(tensors, places)
        try:
            state = await self._averagers[-1].sharing.download(timeout)
        except StateDownloadError as error:
            logger.warning("no parameters from the others: %s", error)
            return None
        metadata = state.metadata if state is not None and isinstance(state.metadata, dict) else {}
        step = _read_step(metadata.get("step"))
        if state is None or step < 0:
            logger.info("nobody has averaged parameters yet")
            return None
        arrived = list(state.tensors.values())
        there, here = _signature(arrived), _signature(tensors)
        if there != here or metadata.get("which") != self._which:
            logger.warning("the others average other parameters: %s there, %s here", _words(there), _words(here))
            return None
        if not await offload(lambda: all(map(all_finite, arrived))):
            logger.warning("parameters that came from the others are no numbers; they are not used")
            return None
        async with self._at_rest():
            await offload(_copy, arrived, tensors)
            await offload(_copy, arrived, self._copies)
            self._state_step, self._behind = step, False
        self._tell(step)
        return step

    async def shutdown(self) -> None:
        """Leaves every group. Idempotent."""
        averagers, self._averagers, self._copies, self._state_step = self._averagers, [], [], -1
        for averager in averagers:
            await averager.shutdown()

    async def _fit(self, tensors: Sequence[torch.Tensor], places: Sequence[int]) -> None:
        """Makes the averagers for these tensors, anew if the last call had others."""
        which = outline(tensors, places).hex()[:16]
        if self._averagers and self._which == which:
            return
        await self.shutdown()
        self._which = which
        self._copies = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        for config in self._configs:
            averager = AveragerCore(
                self._copies, self._groups.dht.node, replace(config, meaning=which), get_state=self._state
            )
            await averager.start()
            self._averagers.append(averager)

    async def _present_step(self, step: int) -> int:
        try:
            told = [offer.epoch for _, offer in await self._averagers[-1].sharing.donors()]
        except (NetworkError, DHTError) as error:
            logger.info("step %d: where the others are is not known: %s", step, error)
            return step
        present = _most(step, [epoch for epoch in told if 0 <= epoch <= MAX_STEP])
        self._behind = self._behind or (present > step and self._state_step < 0)
        return present

    def _tell(self, step: int) -> None:
        """Tells peers that are behind at which step they can find a group."""
        if self._state_step >= 0:
            self._averagers[-1].sharing.declare(StateOffer(epoch=step))

    async def _round(self, averager: AveragerCore, step: int) -> RoundResult:
        # Without retries a search ends when time is up, and not in the middle of another search.
        request = RoundRequest(gather=step, allow_retries=False, epoch=step)
        for remaining in reversed(range(TRIES)):
            control = averager.begin_round(request)
            try:
                return await control
            except RoundFailed as error:
                if not remaining:
                    raise
                logger.info("step %d: the round failed and is tried again: %s", step, error)
            finally:
                control.cancel()  # without effect unless the waiting was interrupted
        raise AssertionError("the last try returns or raises")

    async def _state(self) -> tuple[Any, Sequence[torch.Tensor]]:
        async with self._at_rest():
            if self._state_step < 0:  # the copies may be uninitialized memory of this process
                raise CallRefused("version", "this peer has averaged no parameters of these yet")
            return {"step": self._state_step, "which": self._which}, [copy.clone() for copy in self._copies]

    @asynccontextmanager
    async def _at_rest(self) -> AsyncIterator[None]:
        """Within this block nothing else uses the copies, no round at any level either."""
        async with AsyncExitStack() as stack:
            for averager in self._averagers:
                await stack.enter_async_context(averager.tensors())
            yield


def run_swarm_levels(groups: SwarmGroups, plan: LevelPlan) -> CoreRunner[SwarmLevels]:
    """SwarmLevels on the process's loop thread, for programs without coroutines.

    Raises what SwarmLevels raises, and RuntimeError for a DHT that does not run.
    """
    levels = SwarmLevels(groups, plan)
    if not groups.dht.is_alive():
        raise RuntimeError("the DHT of SwarmGroups is not running; make it with start=True")

    async def make() -> SwarmLevels:
        return levels

    name = f"hierarchical averaging of {groups.prefix!r}"
    runner: CoreRunner[SwarmLevels] = CoreRunner(name, SHUTDOWN_SECONDS)
    runner.start(make, wait=True, timeout=None)
    return runner


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)


def _signature(tensors: Sequence[torch.Tensor]) -> Signature:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


def _words(signature: Signature) -> str:
    return f"{len(signature)} of {sum(shape.numel() for shape, _ in signature)} elements"


def _most(own: int, others: Sequence[int]) -> int:
    """The own step, or the median of the others' if that is higher: one peer that lies far ahead misleads nobody."""
    return max(own, median_high(others)) if others else own


def _read_step(told: Any) -> int:
    """The step that a member claims; -1 if no honest one would claim it."""
    return told if type(told) is int and 0 <= told <= MAX_STEP else -1
