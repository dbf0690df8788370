"""How the processes of a site work together, by the modes of the run and what the volunteer chose for the site.

| run | `hierarchy` | gradients | with `zero` |
| --- | --- | --- | --- |
| averages gradients | refused | each rank sums its own, rank 0 hands in all sums | every rank steps its share |
| local updates | none | rank 0 steps with the mean of all ranks, in every step | every rank steps its share |
| local updates | given | each rank steps with its own, models are averaged by levels | refused |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from swarmcli.optim.modes.base import SiteHooks
from swarmcli.recipe import Recipe
from swarmcli.roles.site_state import load_share
from swarmcli.sites.checkpoint import SiteShards
from swarmcli.sites.commands import Command, LeaderCommands
from swarmcli.sites.gradients import LeaderGradients, LeaderMeans, LeaderSums, MemberGradients, MemberMeans, MemberSums
from swarmcli.sites.hierarchy import LeaderLevels, MemberLevels
from swarmcli.sites.sharded_optimizer import ShareOfOptimizer, SiteOptimizer
from swarmcli.sites.site import Site
from swarmcli.sites.step_sync import SharedModel
from swarmcli.training import optimizer_factory, optimizer_kind, parameter_groups

Handlers = Mapping[type[Command], Callable[[Any], None]]


@dataclass(frozen=True)
class Leading:
    """What rank 0's Optimizer and its SiteLeader are made with."""

    gradients: LeaderGradients
    options: dict[str, Any] = field(default_factory=dict)  # of the Optimizer


@dataclass(frozen=True)
class Following:
    """What another rank's SiteMember is made with."""

    gradients: MemberGradients
    handlers: Handlers = field(default_factory=dict)
    shards: SiteShards | None = None  # to be closed behind the SiteMember


def leading(recipe: Recipe, commands: LeaderCommands, model: nn.Module) -> Leading:
    """For rank 0, while the other ranks call `following`. Raises SiteError when one does not come."""
    chosen = recipe.local.site
    parameters = trained_parameters(recipe, model)
    if chosen.hierarchy:
        levels = LeaderLevels(commands, parameters, chosen.hierarchy)
        return Leading(levels, {"site": SiteHooks(companions=levels)})
    options = _sharded(recipe, commands, model) if chosen.zero else {}
    if recipe.local_updates.enabled:
        return Leading(LeaderMeans(commands.site, parameters), options)
    sums = LeaderSums(commands)
    return Leading(sums, {"site": SiteHooks(sums.make_accumulator), **options})


def _sharded(recipe: Recipe, commands: LeaderCommands, model: nn.Module) -> dict[str, Any]:
    around = partial(SiteOptimizer, commands=commands, shared=SharedModel(commands.site, model))
    return {"optimizer": optimizer_factory(recipe, around)(parameter_groups(recipe, model)), "params": None}


def following(recipe: Recipe, site: Site, model: nn.Module, home: Path) -> Following:
    """For the other ranks. `home`: the site's directory on this machine, for shares of sharded states."""
    chosen, parameters = recipe.local.site, trained_parameters(recipe, model)
    if chosen.hierarchy:
        own = optimizer_factory(recipe)(parameter_groups(recipe, model))
        return Following(MemberLevels(site, own, chosen.hierarchy))
    handlers, shards = {}, None
    if chosen.zero:
        kind, defaults = optimizer_kind(recipe)
        share = ShareOfOptimizer(parameter_groups(recipe, model), kind, site=site, **defaults)
        shards = SiteShards(site, home, share.zero)
        load_share(site, home, share.zero)
        handlers = {**share.handlers, **shards.handlers}
    members = MemberMeans if recipe.local_updates.enabled else MemberSums
    return Following(members(site, parameters), handlers, shards)


def trained_parameters(recipe: Recipe, model: nn.Module) -> list[nn.Parameter]:
    """In the order of the optimizer."""
    return [parameter for group in parameter_groups(recipe, model) for parameter in group["params"]]
