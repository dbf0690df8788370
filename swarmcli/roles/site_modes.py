"""How the processes of a site work together, by the modes of the run and what the volunteer chose for the site.

| run | `hierarchy` | gradients | `zero` |
| --- | --- | --- | --- |
| averages gradients | refused | each rank sums its own, rank 0 hands in all sums | each rank steps its share |
| local updates | no | rank 0 steps with the mean of all ranks, in every step | each rank steps its share |
| local updates | yes | each rank steps with its own, models are averaged by levels | |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from swarmcli.recipe import Recipe
from swarmcli.sites.gradients import LeaderGradients, LeaderMeans, LeaderSums, MemberGradients, MemberMeans, MemberSums
from swarmcli.sites.hierarchy import LeaderLevels, MemberLevels
from swarmcli.sites.orders import Order, OrderDesk
from swarmcli.sites.pace import SharedModel
from swarmcli.sites.sharded_optimizer import ShareOfOptimizer, SiteOptimizer
from swarmcli.sites.site import Site
from swarmcli.training import optimizer_factory, optimizer_kind, parameter_groups

Handlers = Mapping[type[Order], Callable[[Any], None]]


@dataclass
class Leading:
    """What rank 0's Optimizer and its SiteLeader are made with."""

    gradients: LeaderGradients
    options: dict[str, Any] = field(default_factory=dict)  # of the Optimizer


@dataclass
class Following:
    """What another rank's SiteMember is made with."""

    gradients: MemberGradients
    share: ShareOfOptimizer | None  # with `zero`


def leading(recipe: Recipe, site: Site, desk: OrderDesk, model: nn.Module) -> Leading:
    """For rank 0, while the other ranks call `following`. Raises SiteError when one does not come."""
    chosen = recipe.local.site
    if chosen.hierarchy:
        levels = LeaderLevels(site, desk, trained_parameters(recipe, model), chosen.hierarchy)
        return Leading(levels, {"companions": levels})
    if recipe.local_updates.enabled:
        mode = Leading(LeaderMeans(site, trained_parameters(recipe, model)))
    else:
        sums = LeaderSums(site, desk)
        mode = Leading(sums, {"accumulate": sums.accumulate})
    if chosen.zero:
        around = partial(SiteOptimizer, site=site, desk=desk, shared=SharedModel(site, model))
        mode.options["optimizer"] = optimizer_factory(recipe, around)
    return mode


def following(recipe: Recipe, site: Site, model: nn.Module) -> Following:
    """For the other ranks."""
    chosen, parameters = recipe.local.site, trained_parameters(recipe, model)
    if chosen.hierarchy:
        own: torch.optim.Optimizer = optimizer_factory(recipe)(parameter_groups(recipe, model))
        return Following(MemberLevels(site, own, chosen.hierarchy), None)
    share = None
    if chosen.zero:
        kind, defaults = optimizer_kind(recipe)
        share = ShareOfOptimizer(parameter_groups(recipe, model), kind, site=site, **defaults)
    kind_of_gradients = MemberMeans if recipe.local_updates.enabled else MemberSums
    return Following(kind_of_gradients(site, parameters), share)


def trained_parameters(recipe: Recipe, model: nn.Module) -> list[nn.Parameter]:
    """In the order of the optimizer."""
    return [parameter for group in parameter_groups(recipe, model) for parameter in group["params"]]
