"""Which parameters of a recipe's model are trained, and whether the recipe says what the others are."""

from __future__ import annotations

import re

from torch import nn

from swarmcli.errors import RecipeError
from swarmcli.optim.state.frozen import frozen_of
from swarmcli.recipe import Recipe
from swarmcli.words import amount


def freeze(recipe: Recipe, model: nn.Module) -> nn.Module:
    """The model, in which only those parameters are trained that `unfrozen_parameters` names, if it does. Raises
    RecipeError for a pattern that names none. A tied weight is trained by any of its names."""
    patterns = recipe.unfrozen_parameters
    named = list(model.named_parameters(remove_duplicate=False)) if patterns else []
    for _, parameter in named:
        parameter.requires_grad_(False)
    for index, pattern in enumerate(patterns):
        found = [parameter for name, parameter in named if re.match(pattern, name)]
        if not found:
            raise RecipeError(
                f"{recipe.origin('unfrozen_parameters', index)}: unfrozen_parameters: {pattern!r} begins no name of a "
                f"parameter; there are {', '.join(name for name, _ in named[-3:])} and so on"
            )
        for parameter in found:
            parameter.requires_grad_()
    return model


def frozen_bytes(model: nn.Module) -> int:
    """Bytes of the parameters that are not trained. Tied ones count once."""
    return sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)


def check_frozen(recipe: Recipe, model: nn.Module) -> None:
    """Checks a model with its weights. Raises RecipeError, with the digest, if the recipe does not name the weights
    that are not trained: peers with unlike ones would train unlike models."""
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    if frozen and recipe.frozen_weights is None and getattr(model, "lacks_weights", False):
        raise RecipeError(
            f"{recipe.origin('frozen_weights')}: frozen_weights: parameters of {amount(frozen_bytes(model))} are not "
            "trained, and what names them is missing; it can be told only where the model's weights are: run "
            "`swarm validate` on a computer that has them, or reaches the Hub"
        )
    if frozen and recipe.frozen_weights is None:
        raise RecipeError(
            f"{recipe.origin('unfrozen_parameters')}: parameters of {amount(frozen_bytes(model))} are not trained, "
            "and have to be the same at all peers: add what names the ones that are here, "
            f"`frozen_weights: {frozen_of([], model.named_parameters()).digest}`"
        )
    if recipe.frozen_weights is not None and not frozen:
        raise RecipeError(
            f"{recipe.origin('frozen_weights')}: frozen_weights: all parameters are trained; remove the key"
        )


def frozen_in_words(recipe: Recipe, model: nn.Module) -> str:
    """Whether the weights that are not trained are the run's; "": there are none. Raises RecipeError as above."""
    check_frozen(recipe, model)
    frozen = frozen_of([], model.named_parameters(), recipe.frozen_weights or "")
    here = "the run's" if frozen.held else f"others than the run's, which come from its peers; here are {frozen.own}"
    return f"{amount(frozen_bytes(model))}, {here}" if frozen.tensors else ""
