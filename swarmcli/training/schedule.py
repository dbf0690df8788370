"""The optimizer of a recipe and its learning rate over the epochs of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from swarmcli.errors import RecipeError
from swarmcli.optim.arguments import clipping
from swarmcli.optim.modes import Outer
from swarmcli.recipe import Recipe, SchedulerSettings
from swarmcli.recipe.optimizers import OPTIMIZERS
from swarmcli.training.muon import BY_MUON, MuonWithAdamW

# Names of biases and norms, from transformers' Trainer. Peers count parameters by what decays, so this is not left to
# the transformers that each of them has.
_NO_DECAY = ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
AVERAGE = "ema"  # the statistic of a parameter that is its average over epochs


def optimizer_factory(
    recipe: Recipe, around: Callable[..., torch.optim.Optimizer] | None = None
) -> Callable[[Any], torch.optim.Optimizer]:
    """Makes the recipe's optimizer of parameter groups: the model's own, or copies of them elsewhere.

    With `max_grad_norm` and `max_grad_value` each step first clips the gradients: they are the average, equal on all
    peers, so that they stay equal; or, with outer steps, a peer's own. `around(groups, kind, **defaults)` makes one
    that steps as `kind` does.
    """
    kind, defaults = optimizer_kind(recipe)
    averages = recipe.ema_decay > 0 and not recipe.outer.takes_steps
    max_norm, max_value = recipe.optimizer.max_grad_norm, recipe.optimizer.max_grad_value

    def make(groups: Any) -> torch.optim.Optimizer:
        optimizer = kind(groups, **defaults) if around is None else around(groups, kind, **defaults)
        if max_value is not None:
            optimizer.register_step_pre_hook(clipping(max_value, torch.nn.utils.clip_grad_value_))
        if max_norm is not None:
            optimizer.register_step_pre_hook(clipping(max_norm))
        return keep_averages(optimizer, recipe.ema_decay) if averages else optimizer

    return make


def outer_steps(recipe: Recipe) -> Outer | None:
    """The recipe's outer steps; None: it takes none."""
    settings = recipe.outer
    if settings.optimizer is None:
        return None
    named = Outer(settings.inner_batch_size, settings.optimizer, settings.lr, settings.momentum)

    def make(parameters: Any) -> torch.optim.Optimizer:
        return keep_averages(named.make(parameters), recipe.ema_decay)

    return replace(named, optimizer=make) if recipe.ema_decay else named


def keep_averages(optimizer: torch.optim.Optimizer, decay: float) -> torch.optim.Optimizer:
    """The same optimizer, which after each step moves the average over epochs of what it steps. It begins at the
    weights behind the first step, and is a statistic like any: so newcomers download it, and whoever makes up for an
    epoch moves it as the others have."""

    def average(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for parameter in stepped:
            if AVERAGE not in optimizer.state[parameter]:
                optimizer.state[parameter][AVERAGE] = parameter.detach().clone()
        averages = [optimizer.state[parameter][AVERAGE] for parameter in stepped]
        torch._foreach_lerp_(averages, [parameter.detach() for parameter in stepped], 1 - decay)

    optimizer.register_step_post_hook(average)
    return optimizer


def optimizer_kind(recipe: Recipe) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class of the recipe's optimizer, and what it is made with besides the parameters. Raises RecipeError where
    this torch has none of the name."""
    settings, known = recipe.optimizer, OPTIMIZERS[recipe.optimizer.name]
    if not hasattr(torch.optim, known.torch_name):
        raise RecipeError(
            f"{recipe.origin('optimizer', 'name')}: torch {torch.__version__} has no {known.torch_name}; install a "
            "later one, or take another optimizer.name"
        )
    kind: type[torch.optim.Optimizer] = (
        MuonWithAdamW if settings.name == "muon" else getattr(torch.optim, known.torch_name)
    )
    keys = {key: getattr(settings, key) for key in known.keys}
    args = {**known.args, **{name: _as_torch(value) for name, value in settings.args.items()}}
    return kind, {"lr": settings.learning_rate, **keys, **args}


def _as_torch(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def parameter_groups(recipe: Recipe, model: nn.Module) -> list[dict[str, Any]]:
    """The parameters that need gradients, as torch optimizers take them. Those decay that the Trainer has decay."""
    if (told := getattr(model, "optimizer_groups", None)) is not None:  # an outline, which has no names
        return [dict(group) for group in told]
    # Imported here: it takes seconds, which an auxiliary need not wait for.
    from transformers.trainer_pt_utils import get_parameter_names

    settings, decaying = recipe.optimizer, set(get_parameter_names(model, [nn.LayerNorm], _NO_DECAY))
    by_tokens = _of_tokens(model) if settings.name == "muon" else set()
    groups: dict[tuple[bool, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = name in decaying
            by_muon = settings.name == "muon" and parameter.ndim == 2 and decays and id(parameter) not in by_tokens
            groups.setdefault((not decays, not by_muon), {"params": []})["params"].append(parameter)
    for (stays, by_adamw), group in groups.items():
        group["weight_decay"] = 0.0 if stays else settings.weight_decay
        if settings.name == "muon":
            group[BY_MUON] = not by_adamw
    # In this order, whichever parameter comes first: checkpoints and peers count parameters by it.
    return [groups[key] for key in sorted(groups)]


def averages_in(recipe: Recipe, model: nn.Module, optimizer_state: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """The parameters of a model, each with its average in the `state_dict()` of the run's optimizer; none without
    `ema_decay`."""
    if not recipe.ema_decay:
        return []
    parameters = [parameter for group in parameter_groups(recipe, model) for parameter in group["params"]]
    state = optimizer_state.get("state", {})
    return [(each, state[n][AVERAGE]) for n, each in enumerate(parameters) if AVERAGE in state.get(n, {})]


def _of_tokens(model: nn.Module) -> set[int]:
    """The matrices from and to tokens."""
    ends = [getattr(model, name, lambda: None)() for name in ("get_input_embeddings", "get_output_embeddings")]
    embeddings = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    return {id(parameter) for each in [*ends, *embeddings] if each is not None for parameter in each.parameters()}


def build_scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """The learning rate by epoch; its `step()` is called once per epoch, after the optimizer's."""
    return LambdaLR(optimizer, rate_by_epoch(recipe.lr_scheduler, recipe.max_epochs))


def rate_by_epoch(settings: SchedulerSettings, max_epochs: int | None) -> Callable[[int], float]:
    """The factor on the learning rate at an epoch, from 0 to 1: that of transformers' schedule of this name at a step
    of the Trainer, which begins at step 0. Behind the end it stays as it is there."""
    # Imported here: it takes seconds, and an auxiliary has no schedule.
    from transformers import get_scheduler

    name, warmup, floor = settings.name, settings.warmup_epochs, settings.min_lr_ratio
    end = settings.total_epochs or max_epochs or 0
    further = {
        "cosine_with_min_lr": {"min_lr_rate": 0.0},  # floors are below, for all shapes
        "cosine_with_restarts": {"num_cycles": settings.cycles},
        "polynomial": {"power": settings.power, "lr_end": 0.0},
        "warmup_stable_decay": {"num_decay_steps": settings.decay_epochs},
    }
    called = "constant_with_warmup" if name == "constant" else name
    stepped = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    shape = get_scheduler(called, stepped, warmup, end, further.get(name)).lr_lambdas[0]

    def factor(epoch: int) -> float:
        rate: float = shape(min(epoch, end) if settings.ends else epoch)
        rises = epoch < warmup and name != "warmup_stable_decay"  # from 0; that one rises from its floor
        return rate if rises else floor + (1.0 - floor) * rate

    return factor
