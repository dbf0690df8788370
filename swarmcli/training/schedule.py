"""The optimizer of a recipe and its learning rate over the epochs of the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from swarmcli.recipe import OptimizerSettings, Recipe, SchedulerSettings


def build_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimizer over the parameters that need gradients, to be stepped with averaged gradients."""
    return optimizer_factory(recipe)(parameter_groups(recipe, model))


def optimizer_factory(recipe: Recipe) -> Callable[[Any], torch.optim.Optimizer]:
    """Makes the recipe's optimizer of parameter groups: the model's own, or copies of them elsewhere.

    With `max_grad_norm` each step first scales the gradients down to that norm: it is the average's norm, equal on
    all peers, so that they stay equal.
    """
    settings = recipe.optimizer

    def make(groups: Any) -> torch.optim.Optimizer:
        optimizer = _create(settings, groups)
        if settings.max_grad_norm is not None:
            _clip_before_steps(optimizer, settings.max_grad_norm)
        return optimizer

    return make


def parameter_groups(recipe: Recipe, model: nn.Module) -> list[dict[str, Any]]:
    """The parameters that need gradients, as torch optimizers take them. Matrices and embeddings decay, others do
    not."""
    return _groups(model, recipe.optimizer.weight_decay)


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _create(settings: OptimizerSettings, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    match settings.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps)
        case "adam":
            return torch.optim.Adam(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps)
        case "sgd":
            return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=settings.momentum)


def _clip_before_steps(optimizer: torch.optim.Optimizer, max_norm: float) -> None:
    def clip(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], max_norm)

    optimizer.register_step_pre_hook(clip)


def build_scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """The learning rate by epoch; its `step()` is called once per epoch, after the optimizer's."""
    return LambdaLR(optimizer, rate_by_epoch(recipe.lr_scheduler, recipe.max_epochs))


def rate_by_epoch(settings: SchedulerSettings, max_epochs: int | None) -> Callable[[int], float]:
    """The factor on the learning rate at an epoch, from 0 to 1. Behind the end it stays at `min_lr_ratio`."""
    warmup = settings.warmup_steps
    end = settings.total_steps or max_epochs or 0
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
