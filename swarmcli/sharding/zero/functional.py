"""Functional optimizers: torch's variants whose step takes the gradients as an argument."""

from __future__ import annotations

from typing import Any

from torch.distributed.optim.utils import functional_optim_map


def is_functional(optimizer_class: Any) -> bool:
    """Whether this is one of torch's functional optimizers, which hooks can step while the backward pass runs."""
    return optimizer_class in functional_optim_map.values()
