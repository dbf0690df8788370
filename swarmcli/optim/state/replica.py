"""A peer's copy of what the run trains, together with the gradients that it collects for the next step."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from swarmcli.averaging.tasks import on_executor
from swarmcli.averaging.threads import on_all_threads
from swarmcli.network.thread import offload
from swarmcli.optim.gradients.accumulator import GradientAccumulator
from swarmcli.optim.membership.lineage import Standing
from swarmcli.optim.state.training_state import CapturedState, TrainingState


class Replica:
    """A training state whose changes exclude each other and run beside the loop; nobody sees it half changed."""

    def __init__(self, state: TrainingState) -> None:
        self.state = state
        self.gradients = GradientAccumulator([p for p in state.parameters if p.requires_grad])
        self._nbytes = sum(parameter.nbytes for parameter in state.parameters)
        self._lock = asyncio.Lock()  # held while the state changes or is copied

    @property
    def standing(self) -> Standing:
        return self.state.standing

    @property
    def samples(self) -> int:
        """Accumulated for the next step."""
        return self.gradients.samples

    async def accumulate(self, batch_size: int) -> None:
        await on_executor(self._nbytes, self.gradients.add, batch_size)

    async def load_means(self) -> int:
        """Puts the mean of this peer's gradients into `gradients.averaged`; returns how many samples had to be dropped.

        Gradients that are not finite are worth nothing to anybody: they are dropped, all of them, and the mean is zero.
        """
        if await on_executor(self._nbytes, self.gradients.load_means):
            return 0
        dropped = self.gradients.samples
        await on_executor(self._nbytes, self.gradients.reset)
        await on_executor(self._nbytes, self.gradients.load_means)
        return dropped

    async def step(self, round_id: bytes, samples: int) -> None:
        """Steps with what is in `gradients.averaged`; what was accumulated is used up."""
        async with self._lock:
            await offload(on_all_threads, partial(self._step, round_id, samples))

    async def replay(self, averages: Sequence[torch.Tensor], round_id: bytes, samples: int) -> None:
        """Steps with the averages of a round that this peer missed; gradients of the former parameters are dropped."""
        async with self._lock:
            await offload(on_all_threads, partial(self._replay, averages, round_id, samples))

    def _replay(self, averages: Sequence[torch.Tensor], round_id: bytes, samples: int) -> None:
        for mean, average in zip(self.gradients.averaged, averages, strict=True):
            mean.copy_(average)
        self._step(round_id, samples)

    def _step(self, round_id: bytes, samples: int) -> None:
        with self.gradients.averaged_as_gradients():
            self.state.step(round_id, samples)
        self.gradients.reset()

    async def capture(self) -> CapturedState:
        """A copy that later steps do not change."""
        async with self._lock:
            return await on_executor(self._nbytes, lambda: self.state.capture().clone())

    async def restore(self, captured: CapturedState) -> None:
        """Takes over a state; gradients of the former parameters are dropped. ValueError: it does not fit."""
        async with self._lock:
            await on_executor(self._nbytes, self._restore, captured)

    def _restore(self, captured: CapturedState) -> None:
        self.state.restore(captured)
        self.gradients.reset()

    async def load_checkpoint(self, state_dict: Mapping[str, Any]) -> None:
        """See TrainingState.load_checkpoint; gradients of the former parameters are dropped."""
        async with self._lock:
            await on_executor(self._nbytes, self.state.load_checkpoint, state_dict)
            await on_executor(self._nbytes, self.gradients.reset)
