"""Where the optimizer's parameters and statistics live: in the model, or as copies in host memory.

    in place     model ◀──────────── the optimizer steps ─────────────
    offloaded    model ─ gradients ─▶ host copies ◀─ the optimizer steps
                 model ◀── publish ── host copies

Offloading takes the statistics off the accelerator, and it lets the optimizer step while the model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from swarmcli.errors import OptimizerError

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


class ParameterPlacement:
    """`model_parameters[i]` is what the model computes with, `state_parameters[i]` what the optimizer steps.

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
                    f"made: all peers train the same ones; freeze before that, or go on under another run_id"
                )

    def check(self) -> None:
        """Raises OptimizerError, which names the parameter, if something was changed that must stay as it was.

        Not to be called while the optimizer steps.
        """
        self.check_trained()

    def publish(self) -> None:
        """The model computes with the optimizer's parameters of this moment from now on."""

    def adopt(self) -> None:
        """The optimizer goes on from the model's parameters of this moment: they have been restored, for example."""


class InPlace(ParameterPlacement):
    """The optimizer steps the model's own parameters, so there is nothing to publish or to adopt."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(parameters, parameters)


class Offloaded(ParameterPlacement):
    """The optimizer steps copies in host memory, and its statistics are there too.

    The copies have the model's types: so they are bit for bit what a peer without offloading holds, and peers of one
    run may choose for themselves. Who wants the optimizer to step in float32 keeps the model's parameters in float32
    and computes under autocast. Copies are pinned where the model's parameters are on a CUDA device.

    `optimizer` is what the factory made of the copies, with the groups and their options as they were given.
    """

    def __init__(self, params: Params, factory: Callable[[Any], torch.optim.Optimizer]) -> None:
        """`params`: parameters, (name, parameter) pairs or groups of them, as torch optimizers take them.

        Raises TypeError or ValueError if they are none, or if the optimizer is for others than the copies.
        """
        self._copies: dict[torch.Tensor, torch.Tensor] = {}  # of the model's parameters
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
        for parameter, copy in zip(self.model_parameters, self.state_parameters, strict=True):
            parameter.copy_(copy)

    @torch.no_grad()
    def adopt(self) -> None:
        self.check()
        for parameter, copy in zip(self.model_parameters, self.state_parameters, strict=True):
            copy.copy_(parameter)

    def _copied(self, item: Any) -> Any:
        """The same with copies in the places of the model's parameters."""
        if isinstance(item, torch.Tensor):
            if item not in self._copies:
                self._copies[item] = _host_copy(item)
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


def _host_copy(parameter: torch.Tensor) -> torch.Tensor:
    copy = parameter.detach().to("cpu", copy=True)
    if parameter.is_cuda:
        copy = copy.pin_memory()
    return copy.requires_grad_(parameter.requires_grad)
