"""Which parameters of a recipe's model are trained, and whether the recipe says what the others are."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from swarmcli.errors import RecipeError
from swarmcli.optim.state.frozen import FrozenWeights, StoredWeights, frozen_of
from swarmcli.recipe import Recipe
from swarmcli.recipe.pretrained import CONFIG, saved_model
from swarmcli.training.adapters import (
    base_dtype,
    base_files,
    device_of_base,
    load_base,
    made_tensors,
    most_stored,
    stored_tensors,
)
from swarmcli.words import format_size


def freeze(recipe: Recipe, model: nn.Module) -> nn.Module:
    """Returns the model, with only those parameters trained that `unfrozen_parameters` names, if the recipe has that
    key. Raises RecipeError for a pattern that names none. A pattern that matches one name of a tied weight trains
    it."""
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


def run_weights(
    recipe: Recipe, model: nn.Module, directory: Path | None = None, device: torch.device | None = None
) -> FrozenWeights:
    """Returns the run's frozen weights, and whether `model` has them. Those of an adapter's base count as its files
    hold them. What other peers send is kept in `directory` and put on `device`. Raises CheckpointError or
    RecipeError."""
    digest, base_model = recipe.frozen_weights or "", recipe.base_model
    if recipe.adapter is None or not isinstance(base_model, str):
        named = made_tensors(model) if recipe.adapter else model.named_parameters()
        return frozen_of([], named, digest, directory)

    def load(tensors: Mapping[str, torch.Tensor]) -> None:
        load_base(recipe, model, tensors, device or device_of_base(recipe))

    place = base_files(recipe, model)
    return StoredWeights(lambda: stored_tensors(place) if place else {}, digest, directory, load, most_stored(model))


def stored_bytes(recipe: Recipe, outline: nn.Module) -> int:
    """Returns how many bytes a peer downloads that lacks the frozen weights: an adapter's base as its files hold it."""
    nbytes = frozen_bytes(outline)
    if recipe.adapter is None or (saved := saved_model(recipe)) is None:
        return nbytes
    try:
        config = json.loads((saved.directory() / CONFIG).read_text(encoding="utf-8"))
        width = getattr(torch, str(config.get("dtype") or config.get("torch_dtype"))).itemsize
    except (OSError, ValueError, AttributeError):
        width = 4
    return int(nbytes * width // base_dtype(recipe).itemsize)


def check_frozen(recipe: Recipe, model: nn.Module) -> None:
    """Checks the frozen weights of a built model against the recipe. Raises RecipeError, with the digest, if the recipe
    does not name them: peers with different ones would train different models."""
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    if frozen and recipe.frozen_weights is None and getattr(model, "lacks_weights", False):
        raise RecipeError(
            f"{recipe.origin('frozen_weights')}: frozen_weights: parameters of {format_size(frozen_bytes(model))} are "
            "not trained, and what names them is missing; it can be told only where the model's weights are: run "
            "`swarm validate` on a computer that has them, or reaches the Hub"
        )
    if frozen and recipe.frozen_weights is None:
        here = run_weights(recipe, model).own
        named = f"what names the ones that are here, `frozen_weights: {here}`"
        raise RecipeError(
            f"{recipe.origin('adapter' if recipe.adapter else 'unfrozen_parameters')}: parameters of "
            f"{format_size(frozen_bytes(model))} are not trained, and have to be the same at all peers: add "
            f"{named if here else 'frozen_weights, which `swarm validate` tells where the weights are'}"
        )
    if recipe.frozen_weights is not None and not frozen:
        raise RecipeError(
            f"{recipe.origin('frozen_weights')}: frozen_weights: all parameters are trained; remove the key"
        )


def frozen_in_words(recipe: Recipe, model: nn.Module) -> str:
    """Says whether the frozen weights here are the run's; "": there are none. Raises RecipeError as `check_frozen`
    does."""
    check_frozen(recipe, model)
    frozen = run_weights(recipe, model)
    others = f"others than the run's, which come from its peers; here are {frozen.own or 'none'}"
    here = "the run's" if frozen.held else others
    return f"{format_size(frozen_bytes(model))}, {here}" if frozen.digest else ""
