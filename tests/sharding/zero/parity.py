"""Training with our optimizer beside torch's sharded one and an unsharded one, on the same gradients."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from swarmcli.sharding.zero import ZeroRedundancyOptimizer

SHAPES = [(7, 5), (5,), (3, 4, 2), (), (40,), (6, 6), (1,), (2, 9)]

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam": (Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "Adagrad": (Adagrad, {"lr": 0.1, "lr_decay": 0.01}),
    "RMSprop": (RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
}

Maker = Callable[[Any], Any]


def make_parameters(dtypes: Sequence[torch.dtype] = (torch.float32,), seed: int = 1) -> list[torch.nn.Parameter]:
    """The same ones at every call and in every rank."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [torch.nn.Parameter(value.to(dtypes[i % len(dtypes)])) for i, value in enumerate(values)]


def set_gradients(parameters: Sequence[torch.Tensor], step: int) -> None:
    """The same ones in every rank, as DistributedDataParallel leaves them; none for what is frozen."""
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = gradient if parameter.requires_grad else None


def trained(optimizer: Any, parameters: Sequence[torch.Tensor], steps: range) -> None:
    for step in steps:
        set_gradients(parameters, step)
        optimizer.step()


def makers(name: str, **arguments: Any) -> dict[str, Maker]:
    """Ours, torch's and the unsharded one; the arguments are for the two sharded ones."""
    optimizer_class, settings = OPTIMIZERS[name]
    return {
        "ours": lambda params: ZeroRedundancyOptimizer(params, optimizer_class, **arguments, **settings),
        "torch": lambda params: TorchZero(params, optimizer_class, **arguments, **settings),
        "whole": lambda params: optimizer_class(params, **settings),
    }


def assert_bitwise(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    for index, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        assert own.dtype is other.dtype
        assert torch.equal(own, other), f"parameter {index}: {own} is not {other}"


def assert_state_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Two state dicts, bit for bit."""
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, values in theirs["state"].items():
        assert ours["state"][index].keys() == values.keys()
        for name, value in values.items():
            own = ours["state"][index][name]
            if isinstance(value, torch.Tensor):
                assert own.dtype is value.dtype and own.device == value.device
                assert torch.equal(own, value), f"{name} of parameter {index}"
            else:
                assert own == value


@contextmanager
def logged() -> Iterator[list[str]]:
    """The messages of the package while it is open, of this thread: others are other ranks."""
    messages: list[str] = []
    own = threading.get_ident()
    handler = logging.Handler()
    handler.emit = lambda record: record.thread == own and messages.append(record.getMessage())  # type: ignore
    logging.getLogger("swarmcli").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("swarmcli").removeHandler(handler)
