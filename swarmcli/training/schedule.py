"""The optimizer of a recipe and its learning rate over the epochs of the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from swarmcli.recipe import Recipe, SchedulerSettings


def optimizer_factory(
    recipe: Recipe, around: Callable[..., torch.optim.Optimizer] | None = None
) -> Callable[[Any], torch.optim.Optimizer]:
    """Makes the recipe's optimizer of parameter groups: the model's own, or copies of them elsewhere.

    With `max_grad_norm` each step first scales the gradients down to that norm: it is the average's norm, equal on
    all peers, so that they stay equal. `around(groups, kind, **defaults)` makes one that steps as `kind` does.
    """
    kind, defaults = optimizer_kind(recipe)
    max_norm = recipe.optimizer.max_grad_norm

    def clip(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert max_norm is not None
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], max_norm)

    def make(groups: Any) -> torch.optim.Optimizer:
        optimizer = kind(groups, **defaults) if around is None else around(groups, kind, **defaults)
        if max_norm is not None:
            optimizer.register_step_pre_hook(clip)
        return optimizer

    return make


def optimizer_kind(recipe: Recipe) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class of the recipe's optimizer, and what it is made with besides the parameters."""
    settings = recipe.optimizer
    kind: type[torch.optim.Optimizer]
    own: dict[str, Any]
    match settings.name:
        case "adamw":
            kind, own = torch.optim.AdamW, {"betas": settings.betas, "eps": settings.eps}
        case "adam":
            kind, own = torch.optim.Adam, {"betas": settings.betas, "eps": settings.eps}
        case "sgd":
            kind, own = torch.optim.SGD, {"momentum": settings.momentum}
    return kind, {"lr": settings.learning_rate, **own}


def parameter_groups(recipe: Recipe, model: nn.Module) -> list[dict[str, Any]]:
    """The parameters that need gradients, as torch optimizers take them. Matrices and embeddings decay, others do
    not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": recipe.optimizer.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """The learning rate by epoch; its `step()` is called once per epoch, after the optimizer's."""
    return LambdaLR(optimizer, rate_by_epoch(recipe.lr_scheduler, recipe.max_epochs))


def rate_by_epoch(settings: SchedulerSettings, max_epochs: int | None) -> Callable[[int], float]:
    """The factor on the learning rate at an epoch, from 0 to 1. Behind the end it stays at `min_lr_ratio`."""
    warmup = settings.warmup_epochs
    end = settings.total_epochs or max_epochs or 0
    shapes: dict[str, Callable[[float], float]] = {
        "constant": lambda progress: 1.0,
        "linear": lambda progress: 1.0 - progress,
        "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    }
    shape, floor = shapes[settings.name], settings.min_lr_ratio

    def factor(epoch: int) -> float:
        if epoch < warmup:
            return (epoch + 1) / (warmup + 1)
        progress = min(1.0, (epoch - warmup) / max(1, end - warmup))
        return floor + (1.0 - floor) * shape(progress)

    return factor
