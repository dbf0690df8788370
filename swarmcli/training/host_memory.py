"""Copies in host memory of what may be on a device that has no room for a second one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


@torch.no_grad()
def on_host(value: T) -> T:
    """A deep copy of a model, or of nested state, whose tensors are in host memory. On the device nothing is copied."""
    copied: Any
    match value:
        case nn.Module():
            # What deepcopy finds here it takes for copied already; tied weights stay tied.
            tensors = {id(tensor): on_host(tensor) for tensor in [*value.parameters(), *value.buffers()]}
            copied = copy.deepcopy(value, tensors)
        case nn.Parameter():
            copied = nn.Parameter(value.detach().to("cpu", copy=True), value.requires_grad)
        case Tensor():
            copied = value.detach().to("cpu", copy=True)
        case Mapping():
            copied = {key: on_host(item) for key, item in value.items()}
        case list() | tuple():
            copied = type(value)(map(on_host, value))
        case _:
            copied = copy.deepcopy(value)
    found: T = copied
    return found
