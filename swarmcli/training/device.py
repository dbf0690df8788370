"""Chooses device and precision, scales float16's loss, and copies models into host memory, since a device may have no
room for two."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swarmcli.errors import RecipeError
from swarmcli.recipe import Recipe
from swarmcli.training.task import Batch

LEAST_SCALE = 2.0**-14  # float16's smallest normal number: a smaller scale would lose the loss itself


class LossScaler:
    """Scales the loss so that small gradients do not underflow in float16, and unscales the gradients (Micikevicius et
    al., arXiv 1710.03740, section 3.2). Each peer has its own scale: the optimizer gets unscaled gradients."""

    def __init__(self, scale: float = 65536.0, growth_steps: int = 2000) -> None:
        """`growth_steps`: after so many steps without an overflow the scale doubles."""
        self.scale = scale
        self._growth_steps = growth_steps
        self._steps = 0  # since the scale last moved

    def unscale(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Unscales the gradients. Returns whether all are finite; otherwise the scale is halved."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not gradients:
            return True
        torch._foreach_mul_(gradients, 1.0 / self.scale)
        finite = bool(torch.nn.utils.get_total_norm(gradients).isfinite())
        self._steps = self._steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, LEAST_SCALE)
        elif self._steps >= self._growth_steps:
            self.scale, self._steps = self.scale * 2, 0
        return finite


@dataclass(frozen=True)
class Compute:
    """A device and the precision of the forward pass; parameters, gradients and sums stay in float32."""

    device: torch.device
    autocast_dtype: torch.dtype | None = None

    def autocast(self) -> AbstractContextManager[object]:
        """A block in which matrix products are computed in the chosen precision."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype)

    def place(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the batch on the device. From pinned memory a copy to CUDA would not block; batches are too small for
        that to matter."""
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def wait(self) -> None:
        """Returns when the device has finished its work, which it does asynchronously."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    @property
    def kind(self) -> str:
        """A name that all devices of a kind share, such as "cuda (bfloat16)"."""
        return f"{self.device.type} ({str(self.autocast_dtype or torch.float32).partition('.')[2]})"

    def __str__(self) -> str:
        return self.kind.replace(self.device.type, str(self.device), 1)


def choose_compute(recipe: Recipe, process: int = 0) -> Compute:
    """Chooses as `local.device`, `local.dtype` and `local.threads` ask; sets torch's threads if the recipe does.

    `process`: this process's number among those of a site on this machine; it takes the CUDA device of that number.
    Raises RecipeError when this machine has no such device.
    """
    local = recipe.local
    if local.threads is not None:
        torch.set_num_threads(local.threads)
    device = torch.device(_best_device() if local.device == "auto" else local.device)
    if device.type == "cuda" and local.site.processes > 1:
        return _compute_of_process(recipe, process)
    missing = _what_is_missing(device)
    if missing:
        raise RecipeError(
            f"{recipe.origin('local', 'device')}: local.device is {local.device}, but {missing}; "
            "set it to auto, or to cpu"
        )
    return _in_its_precision(recipe, device)


def best_compute() -> Compute:
    """Returns what a recipe's `auto` means on this machine."""
    device = torch.device(_best_device())
    return Compute(device, torch.bfloat16 if _is_fast_in_bfloat16(device) else None)


def _compute_of_process(recipe: Recipe, process: int) -> Compute:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if process >= count:
        found = f"there are {count}" if count else "torch finds none at all"
        raise RecipeError(
            f"{recipe.origin('local', 'device')}: local.device is {recipe.local.device}, but process {process} of the "
            f"site finds no CUDA device of its own on this machine: {found}; start as many processes as there are "
            "devices (--nproc), or set local.device to cpu"
        )
    device = torch.device("cuda", process)
    torch.cuda.set_device(device)
    return _in_its_precision(recipe, device)


def _in_its_precision(recipe: Recipe, device: torch.device) -> Compute:
    dtype = recipe.local.dtype
    torch.set_float32_matmul_precision(recipe.local.matmul_precision)
    if dtype == "auto":
        return Compute(device, torch.bfloat16 if _is_fast_in_bfloat16(device) else None)
    return Compute(device, {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype])


def _best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _what_is_missing(device: torch.device) -> str | None:
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return "torch finds no CUDA device"
        if (device.index or 0) >= torch.cuda.device_count():
            return f"there are only {torch.cuda.device_count()} CUDA devices"
    if device.type == "mps" and not torch.backends.mps.is_available():
        return "torch finds no MPS device"
    return None


def _is_fast_in_bfloat16(device: torch.device) -> bool:
    # Emulated bfloat16 (devices before Ampere) is slower than float32.
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def on_host(model: nn.Module) -> nn.Module:
    """Returns a copy of a model with its tensors in host memory. On the device nothing is copied. The base of an
    adapter never changes: the copy shares it where it is, perhaps quantized."""
    adapted = hasattr(model, "peft_config")
    shared = {id(each): each for each in model.parameters() if adapted and not each.requires_grad}

    def copied(tensor: Tensor) -> Tensor:
        here = tensor.detach().to("cpu", copy=True)
        return nn.Parameter(here, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else here

    # deepcopy takes these for copied already; tied weights stay tied.
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, shared | {id(each): copied(each) for each in tensors if id(each) not in shared})
