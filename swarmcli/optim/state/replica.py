"""A peer's copy of what the run trains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

from swarmcli.network.loop_thread import offload
from swarmcli.optim.peers.lineage import Standing
from swarmcli.optim.state.placement import ParameterPlacement
from swarmcli.optim.state.training_state import CapturedState, TrainingState
from swarmcli.tasks import OFFLOAD_FROM, on_executor
from swarmcli.threads import on_all_threads, on_one_thread

T = TypeVar("T")


class Companions(Protocol):
    """Other processes that are one peer with this one, and learn with parameters of their own beside it."""

    @property
    def at_rest(self) -> bool:
        """Whether they do not learn at this moment, so that `gather` gets all that they have learned."""

    def gather(self) -> None:
        """Brings what all of them have learned into the parameters here. Waits for them: never on the event loop."""

    def note_replaced(self) -> None:
        """The parameters here are another peer's now, or a checkpoint's; what the others have learned is void."""


class Replica:
    """A training state whose changes exclude each other and run beside the loop; nobody sees it half changed.

    The model computes with the state's own parameters or, where the optimizer lives elsewhere, with copies of them,
    which only change by `publish`.
    """

    def __init__(
        self, state: TrainingState, placement: ParameterPlacement, companions: Companions | None = None
    ) -> None:
        self.state = state
        self.placement = placement
        self._companions = companions
        self._nbytes = sum(parameter.nbytes for parameter in state.parameters)
        # An optimizer with statistics in other processes waits for them: then nothing is small enough for the loop.
        if state.statistics.waits or getattr(state.optimizer, "waits", False):
            self._nbytes = max(self._nbytes, OFFLOAD_FROM)
        self.generation = 0  # how often another state has come in this one's place
        self._lock = asyncio.Lock()  # held while the state changes or is copied

    @property
    def standing(self) -> Standing:
        return self.state.standing

    async def change(self, action: Callable[[], T]) -> T:
        """Runs `action`, which changes the state or gives a new one, with all processors. Then it is wholly done.

        The step of a small model takes a third of a millisecond; handing it to another thread, which has to win the
        interpreter from this one and back, takes up to 6 ms on a busy machine.
        """
        async with self._lock:
            if self._nbytes < OFFLOAD_FROM:
                return on_one_thread(action)
            return await offload(lambda: on_all_threads(action))

    @property
    def may_gather(self) -> bool:
        """Whether `gather` may be called now: within a step always."""
        return self._companions is None or self._companions.at_rest

    async def gather(self) -> None:
        """Before the parameters are averaged with other peers', or moved by an average: they become those of all
        processes of this peer."""
        if self._companions is not None:
            await self.alone(self._companions.gather)

    async def alone(self, action: Callable[[], T]) -> T:
        """Runs `action` while nobody else reads or changes the state. It may wait: it is never on the event loop."""
        async with self._lock:
            return await offload(action)

    async def pass_by(self, wanted: Standing, following: Callable[[Standing], Standing]) -> bool:
        """Ends epochs up to `wanted` without a step; False, and nothing changed, if `following` leads elsewhere."""
        path = [self.standing]
        while path[-1].epoch < wanted.epoch:
            path.append(following(path[-1]))
        if path[-1] != wanted:
            return False
        for standing in path[1:]:
            await self.change(partial(self.state.end_epoch, standing))
        return True

    async def publish(self) -> None:
        """The model computes with the present parameters from now on. To be called while the trainer waits."""
        async with self._lock:
            await on_executor(self._nbytes, self.placement.publish)

    async def check(self) -> None:
        """Raises OptimizerError if something was changed that must stay; see ParameterPlacement.check."""
        async with self._lock:
            self.placement.check()

    async def capture(self) -> CapturedState:
        """A copy that later steps do not change."""
        async with self._lock:
            return await on_executor(self._nbytes, lambda: self.state.capture().clone())

    async def restore(self, captured: CapturedState) -> None:
        """Takes over a state. ValueError: it does not fit."""
        async with self._lock:
            await on_executor(self._nbytes, self.state.restore, captured)
            await on_executor(self._nbytes, self.placement.publish)
            self._note_replaced()

    async def checkpoint(self) -> dict[str, Any]:
        """See TrainingState.checkpoint. Of a large model the digest takes seconds, and the loop goes on meanwhile."""
        async with self._lock:
            return await on_executor(self._nbytes, self.state.checkpoint)

    async def load_checkpoint(self, state_dict: Mapping[str, Any]) -> None:
        """See TrainingState.load_checkpoint; the model's parameters are those of the checkpoint."""
        async with self._lock:
            await on_executor(self._nbytes, self.placement.adopt)
            await on_executor(self._nbytes, self.state.load_checkpoint, state_dict)
            self._note_replaced()

    def _note_replaced(self) -> None:
        self.generation += 1
        if self._companions is not None:
            self._companions.note_replaced()
