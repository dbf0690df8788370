"""How the processes of a site work together, by the modes of the run and what the volunteer chose for the site.

| run | `hierarchy` | gradients | with `zero` |
| --- | --- | --- | --- |
| averages gradients | refused | each rank sums its own, rank 0 hands in all sums | every rank steps its share |
| local updates | none | rank 0 steps with the mean of all ranks, in every step | every rank steps its share |
| local updates | given | each rank steps with its own, models are averaged by levels | a first group steps as one |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from swarmcli.recipe import Recipe
from swarmcli.roles.site_state import load_share
from swarmcli.sharding import ZeroRedundancyOptimizer
from swarmcli.sites.checkpoint import SiteShards
from swarmcli.sites.crew import Crew, CrewLearner
from swarmcli.sites.gradients import LeaderGradients, LeaderMeans, LeaderSums, MemberGradients, MemberMeans, MemberSums
from swarmcli.sites.hierarchy import LeaderLevels, MemberLevels
from swarmcli.sites.orders import Order, OrderDesk
from swarmcli.sites.pace import SharedModel
from swarmcli.sites.sharded_optimizer import ShareOfOptimizer, SiteOptimizer
from swarmcli.sites.site import Site
from swarmcli.training import optimizer_factory, optimizer_kind, parameter_groups

Handlers = Mapping[type[Order], Callable[[Any], None]]


@dataclass(frozen=True)
class Leading:
    """What rank 0's Optimizer and its SiteLeader are made with, and where its sharded optimizer's orders go."""

    gradients: LeaderGradients
    site: Site  # whose ranks share the optimizer
    desk: OrderDesk
    options: dict[str, Any] = field(default_factory=dict)  # of the Optimizer
    crew: AbstractContextManager[Any] = field(default_factory=nullcontext)  # within the SiteLeader


@dataclass(frozen=True)
class Following:
    """What another rank's SiteMember is made with."""

    gradients: MemberGradients
    handlers: Handlers = field(default_factory=dict)
    shards: SiteShards | None = None  # to be closed behind the SiteMember
    crew: AbstractContextManager[Any] = field(default_factory=nullcontext)  # within the SiteMember


def leading(recipe: Recipe, site: Site, desk: OrderDesk, model: nn.Module) -> Leading:
    """For rank 0, while the other ranks call `following`. Raises SiteError when one does not come."""
    chosen = recipe.local.site
    if chosen.hierarchy:
        return _leading_levels(recipe, site, desk, model)
    options = _sharded(recipe, site, desk, SharedModel(site, model), model) if chosen.zero else {}
    if recipe.local_updates.enabled:
        return Leading(LeaderMeans(site, trained_parameters(recipe, model)), site, desk, options)
    sums = LeaderSums(site, desk)
    return Leading(sums, site, desk, {"accumulate": sums.accumulate, **options})


def _leading_levels(recipe: Recipe, site: Site, desk: OrderDesk, model: nn.Module) -> Leading:
    hierarchy, parameters = recipe.local.site.hierarchy, trained_parameters(recipe, model)
    crew = Crew.form(site, first_size(hierarchy)) if recipe.local.site.zero else None
    if crew is None or crew.site is None or crew.desk is None:
        levels = LeaderLevels(site, desk, parameters, hierarchy)
        return Leading(levels, site, desk, {"companions": levels})
    # Made before the levels, as at the other ranks: whoever forms groups waits for the others to form the same.
    options = _sharded(recipe, crew.site, crew.desk, SharedModel(site, model), model)
    levels = LeaderLevels(site, desk, parameters, hierarchy, crew)
    return Leading(levels, crew.site, crew.desk, {"companions": levels, **options}, crew)


def _sharded(recipe: Recipe, site: Site, desk: OrderDesk, shared: SharedModel, model: nn.Module) -> dict[str, Any]:
    around = partial(SiteOptimizer, site=site, desk=desk, shared=shared)
    return {"optimizer": optimizer_factory(recipe, around)(parameter_groups(recipe, model)), "params": None}


def following(recipe: Recipe, site: Site, model: nn.Module, home: Path) -> Following:
    """For the other ranks. `home`: the site's directory on this machine, for shares of sharded states."""
    chosen = recipe.local.site
    if chosen.hierarchy:
        return _following_levels(recipe, site, model, home)
    parameters = trained_parameters(recipe, model)
    handlers, shards = {}, None
    if chosen.zero:
        share = _share(recipe, site, model)
        shards = SiteShards(site, home, share.zero)
        load_share(site, home, share.zero)
        handlers = {**share.handlers, **shards.handlers}
    kind = MemberMeans if recipe.local_updates.enabled else MemberSums
    return Following(kind(site, parameters), handlers, shards)


def _following_levels(recipe: Recipe, site: Site, model: nn.Module, home: Path) -> Following:
    hierarchy = recipe.local.site.hierarchy
    if not recipe.local.site.zero:
        own = optimizer_factory(recipe)(parameter_groups(recipe, model))
        return Following(MemberLevels(site, own, hierarchy))
    crew = Crew.form(site, first_size(hierarchy))
    if crew.site is None:
        around = partial(ZeroRedundancyOptimizer, process_group=crew.pace)
        own = optimizer_factory(recipe, around)(parameter_groups(recipe, model))
        assert isinstance(own, ZeroRedundancyOptimizer)
        return Following(MemberLevels(site, CrewLearner(crew, own), hierarchy), crew=crew)
    share = _share(recipe, crew.site, model)
    shards = SiteShards(crew.site, home, share.zero)
    levels = MemberLevels(site, CrewLearner(crew, share, shards.handlers), hierarchy)
    load_share(crew.site, home, share.zero)
    return Following(levels, shards=shards, crew=crew)


def _share(recipe: Recipe, site: Site, model: nn.Module) -> ShareOfOptimizer:
    kind, defaults = optimizer_kind(recipe)
    return ShareOfOptimizer(parameter_groups(recipe, model), kind, site=site, **defaults)


def first_size(hierarchy: Mapping[int, int]) -> int:
    """Of the groups that average most often."""
    return next(iter(hierarchy.values()))


def trained_parameters(recipe: Recipe, model: nn.Module) -> list[nn.Parameter]:
    """In the order of the optimizer."""
    return [parameter for group in parameter_groups(recipe, model) for parameter in group["params"]]
