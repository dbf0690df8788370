"""A peer's copy of what the run trains, and where it lies: in the model, or in host memory.

    in place     model ◀──────────── the optimizer steps ─────────────
    offloaded    model ─ gradients ─▶ host copies ◀─ the optimizer steps
                 model ◀── publish ── host copies

Offloading takes the statistics off the accelerator, and it lets the optimizer step while the model computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from swarmcli.concurrency import OFFLOAD_FROM, on_all_processors, on_executor
from swarmcli.errors import OptimizerError
from swarmcli.network.loop_thread import offload
from swarmcli.optim.state.buffers import Buffers
from swarmcli.optim.state.lineage import LineagePosition
from swarmcli.optim.state.training_state import CapturedState, TrainingState

T = TypeVar("T")


class Replica:
    """A training state whose changes exclude each other, and run beside the loop if they take long. Nobody sees it half
    changed.

    The model computes with the state's own parameters or, if the optimizer steps others, with copies of these, which
    only `publish` changes.
    """

    def __init__(
        self,
        state: TrainingState,
        placement: ParameterPlacement,
        buffers: Buffers | None = None,
    ) -> None:
        """`buffers`: the model's, if the state has copies of them."""
        self.state = state
        self.placement = placement
        self.buffers = buffers or Buffers([])
        self._nbytes = sum(parameter.nbytes for parameter in state.parameters)
        # An optimizer with statistics in other processes waits for these: then no work is short enough for the loop.
        if state.statistics.waits or getattr(state.optimizer, "waits", False):
            self._nbytes = max(self._nbytes, OFFLOAD_FROM)
        self.generation = 0  # how often another state has replaced this one
        self._lock = asyncio.Lock()  # held while the state changes or is copied

    @property
    def position(self) -> LineagePosition:
        return self.state.position

    async def change(self, action: Callable[[], T]) -> T:
        """Runs `action`, which changes or copies the state, with all processors, to its end.

        Small work runs in the loop's thread: the step of a small model takes a third of a millisecond, and handing it
        to another thread, which has to get the interpreter from this one and give it back, up to 6 ms on a busy
        machine.
        """
        async with self._lock:
            return await on_all_processors(self._nbytes, action)

    async def _beside(self, work: Callable[[], T]) -> T:
        """Runs `work` on one processor, so as not to slow down the trainer, while nobody else reads or changes the
        state.
        """
        async with self._lock:
            return await on_executor(self._nbytes, work)

    async def alone(self, action: Callable[[], T]) -> T:
        """Runs `action` while nobody else reads or changes the state. It may block: it never runs on the event loop."""
        async with self._lock:
            return await offload(action)

    async def publish(self) -> None:
        """From now on the model computes with the present parameters. Only while the trainer waits."""
        await self._beside(lambda: self._publish(self.placement.publish))

    async def rest(self) -> None:
        """Gives the model the state's parameters alone, to be saved. What the model has learned beside them comes back
        with the next `publish`."""
        await self._beside(lambda: self._publish(self.placement.rest))

    def _publish(self, publish: Callable[[], None]) -> None:
        publish()
        self.buffers.publish()

    async def check(self) -> None:
        """Raises OptimizerError if something was changed that must stay as it was; see ParameterPlacement.check."""
        await self._beside(self.placement.check)

    async def capture(self) -> CapturedState:
        """Returns a copy that later steps do not change. Raises OptimizerError if the state is torn."""
        return await self._beside(lambda: self.state.capture().clone())

    async def restore(self, captured: CapturedState) -> None:
        """Takes over a state. Raises ValueError if it does not fit; for other errors see TrainingState.restore."""
        async with self._lock:
            try:
                await on_executor(self._nbytes, self.state.restore, captured)
            finally:
                if self.state.torn:  # an average of the old state must not be applied to this one
                    self.generation += 1
            self.buffers.replace()
            await on_executor(self._nbytes, self.placement.publish)
            self.generation += 1

    async def checkpoint(self) -> dict[str, Any]:
        """See TrainingState.checkpoint. The digest of a large model takes seconds, and the loop goes on meanwhile."""
        return await self._beside(self.state.checkpoint)

    async def load_checkpoint(
        self, state_dict: Mapping[str, Any], accepted: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Takes over a checkpoint, see TrainingState.read_checkpoint; the model has its parameters already. `accepted`
        is called before anything changes. Raises ValueError or OptimizerError if the checkpoint is refused: then
        nothing has changed, nor have the copies of an offloaded optimizer."""
        async with self._lock:
            place, read = self.placement, self.state.read_checkpoint
            place.check()
            install = await on_executor(self._nbytes, read, state_dict, place.model_parameters)
            if accepted is not None:
                await accepted()
            await on_executor(self._nbytes, place.adopt)
            self.buffers.adopt()
            await on_executor(self._nbytes, install)
            self.buffers.replace()
            self.generation += 1


Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


class ParameterPlacement:
    """Where the parameters lie: the model computes with `model_parameters[i]`, the optimizer steps
    `state_parameters[i]`.

    Both are in the order of the optimizer's parameter groups.
    """

    def __init__(self, model_parameters: Iterable[torch.Tensor], state_parameters: Iterable[torch.Tensor]) -> None:
        self.model_parameters = tuple(model_parameters)
        self.state_parameters = tuple(state_parameters)
        self._trained = [parameter.requires_grad for parameter in self.model_parameters]

    def check_trained(self) -> None:
        """Raises OptimizerError if a parameter has been frozen or unfrozen."""
        for index, (parameter, then) in enumerate(zip(self.model_parameters, self._trained, strict=True)):
            if parameter.requires_grad != then:
                raise OptimizerError(
                    f"parameter {index} was {'frozen' if then else 'unfrozen'} (requires_grad) after the Optimizer was "
                    f"made: all peers train the same ones; freeze, or add adapters (peft's get_peft_model in the place "
                    f"of trl's `peft_config`), before that, or go on under another run_id"
                )

    def check(self) -> None:
        """Raises OptimizerError, which names the parameter, if something was changed that must stay as it was. Not
        while the optimizer steps."""
        self.check_trained()

    def publish(self) -> None:
        """From now on the model computes with the optimizer's present parameters."""

    def rest(self) -> None:
        """Gives the model the optimizer's parameters alone, to be saved, until the next `publish`."""
        self.publish()

    def shift(self) -> None:
        """The state's parameters are about to change, and not by a step."""

    def adopt(self) -> None:
        """The optimizer goes on from the model's present parameters, which have been restored, for example."""


class InPlace(ParameterPlacement):
    """The optimizer steps the model's own parameters, so there is nothing to publish or to adopt."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(parameters, parameters)


class Offloaded(ParameterPlacement):
    """The optimizer steps copies in host memory, and its statistics are there too.

    The copies have the model's types: so they equal, bit for bit, what a peer without offloading holds, and each peer
    of a run may choose. If you want the optimizer to step in float32, keep the model's parameters in float32 and
    compute under autocast. Copies are pinned if the model's parameters are on a CUDA device. Parameters that nobody
    trains have no copies.

    `optimizer` is what the factory made of the copies, with the groups and their options as they were given.
    """

    def __init__(self, params: Params, factory: Callable[[Any], torch.optim.Optimizer]) -> None:
        """`params`: parameters, (name, parameter) pairs or groups of them, as torch optimizers take them.

        Raises TypeError or ValueError for anything else, and if the factory's optimizer has other parameters than the
        copies.
        """
        self._copies: dict[torch.Tensor, torch.Tensor] = {}  # parameter of the model → its copy
        self.optimizer = factory([self._copied(item) for item in _as_list(params, "params")])
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer: the factory returned {type(self.optimizer).__name__}, expected a torch optimizer"
            )
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        models = {copy: parameter for parameter, copy in self._copies.items()}
        if not models.keys() >= set(stepped):
            raise ValueError("optimizer: the factory has to make it for the parameters that it is given, and no others")
        super().__init__([models[copy] for copy in stepped], stepped)
        both = zip(self.model_parameters, self.state_parameters, strict=True)
        self._pairs = [(parameter, copy) for parameter, copy in both if parameter.requires_grad]
        self._form = [(parameter.shape, parameter.dtype) for parameter in self.model_parameters]

    def check(self) -> None:
        self.check_trained()
        for index, (parameter, form) in enumerate(zip(self.model_parameters, self._form, strict=True)):
            if (parameter.shape, parameter.dtype) != form:
                raise OptimizerError(
                    f"parameter {index} has become {parameter.dtype} of shape {tuple(parameter.shape)}; the offloaded "
                    f"optimizer steps a copy of {form[1]} and shape {tuple(form[0])}, and that must stay"
                )
        for index, copy in enumerate(self.state_parameters):
            if copy.grad is not None:
                raise OptimizerError(
                    f"the offloaded optimizer's parameter {index} was given a gradient: it steps with the swarm's "
                    f"average and nothing else; gradients belong to the model's parameters"
                )

    @torch.no_grad()
    def publish(self) -> None:
        self.check()
        for parameter, copy in self._pairs:
            parameter.copy_(copy)

    @torch.no_grad()
    def adopt(self) -> None:
        self.check()
        for parameter, copy in self._pairs:
            copy.copy_(parameter)

    def _copied(self, item: Any) -> Any:
        """Returns the item with copies in place of the model's parameters."""
        if isinstance(item, torch.Tensor):
            if item not in self._copies and item.requires_grad:
                copy = item.detach().to("cpu", copy=True)
                copy = copy.pin_memory() if item.is_cuda else copy
                self._copies[item] = copy.requires_grad_()
            self._copies.setdefault(item, item)
            return self._copies[item]
        if isinstance(item, dict):
            inside = item.get("params", ())
            inside = [inside] if isinstance(inside, torch.Tensor) else _as_list(inside, "params of a group")
            return {**item, "params": [self._copied(each) for each in inside]}
        if isinstance(item, tuple) and len(item) == 2:
            return item[0], self._copied(item[1])
        raise TypeError(f"params: expected parameters or groups of them, got {type(item).__name__}")


def _as_list(params: Any, where: str) -> list[Any]:
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise TypeError(f"{where}: expected an iterable of parameters or of groups, got {type(params).__name__}")
    return list(params)
