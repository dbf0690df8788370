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

# Names of biases and norms, as transformers' Trainer has them. The order in which peers number parameters depends on
# what decays, so it must not depend on the transformers that each of them has.
_NO_DECAY = ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
AVERAGE = "ema"  # the statistic of a parameter that is its average over epochs


def optimizer_factory(
    recipe: Recipe, around: Callable[..., torch.optim.Optimizer] | None = None
) -> Callable[[Any], torch.optim.Optimizer]:
    """Returns a function that makes the recipe's optimizer for parameter groups: the model's own, or copies of them
    elsewhere.

    With `max_grad_norm` and `max_grad_value` each step first clips the gradients: the average, equal on all peers,
    which so stays equal; or, with outer steps, a peer's own. `around(groups, kind, **defaults)` makes an optimizer that
    steps as `kind` does.
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
    """Has an optimizer move, after each step, an average over epochs of what it steps, and returns it. The average
    begins at the weights after the first step, and is a statistic like any other: newcomers download it, and a peer
    that replays an epoch moves it as the others have."""

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
    """Returns the class of the recipe's optimizer, and its arguments besides the parameters. Raises RecipeError where
    this torch has no class of that name."""
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
    """Returns the parameters that need gradients, as torch optimizers take them. Weight decay is where transformers'
    Trainer has it."""
    if (told := getattr(model, "optimizer_groups", None)) is not None:  # an outline, which has no names
        return [dict(group) for group in told]
    # Imported here: the import takes seconds, for which an auxiliary need not wait.
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
    # Sorted, whichever parameter comes first: checkpoints and peers number parameters in this order.
    return [groups[key] for key in sorted(groups)]


def averages_in(recipe: Recipe, model: nn.Module, optimizer_state: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Returns the parameters of a model, each with its average in the `state_dict()` of the run's optimizer; none
    without `ema_decay`."""
    if not recipe.ema_decay:
        return []
    parameters = [parameter for group in parameter_groups(recipe, model) for parameter in group["params"]]
    state = optimizer_state.get("state", {})
    return [(each, state[n][AVERAGE]) for n, each in enumerate(parameters) if AVERAGE in state.get(n, {})]


def _of_tokens(model: nn.Module) -> set[int]:
    """Returns the ids of the matrices from and to tokens."""
    ends = [getattr(model, name, lambda: None)() for name in ("get_input_embeddings", "get_output_embeddings")]
    embeddings = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    return {id(parameter) for each in [*ends, *embeddings] if each is not None for parameter in each.parameters()}


def build_scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """The learning rate by epoch; its `step()` is called once per epoch, after the optimizer's."""
    return LambdaLR(optimizer, rate_by_epoch(recipe.lr_scheduler, recipe.max_epochs))


def rate_by_epoch(settings: SchedulerSettings, max_epochs: int | None) -> Callable[[int], float]:
    """Returns the factor on the learning rate at an epoch, from 0 to 1: transformers' schedule of this name, at the
    Trainer's step of that number (its steps begin at 0). After the schedule's end the factor stays as it is there."""
    # Imported here: the import takes seconds, and an auxiliary has no schedule.
    from transformers import get_scheduler

    name, warmup, floor = settings.name, settings.warmup_epochs, settings.min_lr_ratio
    end = settings.total_epochs or max_epochs or 0
    further = {
        "cosine_with_min_lr": {"min_lr_rate": 0.0},  # `factor` applies the floor, for all shapes
        "cosine_with_restarts": {"num_cycles": settings.cycles},
        "polynomial": {"power": settings.power, "lr_end": 0.0},
        "warmup_stable_decay": {"num_decay_steps": settings.decay_epochs},
    }
    called = "constant_with_warmup" if name == "constant" else name
    stepped = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    shape = get_scheduler(called, stepped, warmup, end, further.get(name)).lr_lambdas[0]

    def factor(epoch: int) -> float:
        rate: float = shape(min(epoch, end) if settings.ends else epoch)
        # rises from 0; warmup_stable_decay rises from its floor
        rises = epoch < warmup and name != "warmup_stable_decay"
        return rate if rises else floor + (1.0 - floor) * rate

    return factor
