"""`local.site`: several processes of one volunteer that are one peer of the run."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, field_validator, model_validator

from swarmcli.recipe.checks import Conflict
from swarmcli.recipe.section import Section, own

if TYPE_CHECKING:
    from swarmcli.recipe.schema import Recipe

MAX_PROCESSES = 1024
Period = Annotated[int, Field(ge=1)]
GroupSize = Annotated[int, Field(ge=2)]


class SiteSettings(Section):
    """Processes that train together behind one peer, on one machine or on several."""

    processes: int = own(
        1, "how many processes are one peer; 1: no site (`--nproc` and torchrun say it too)", ge=1, le=MAX_PROCESSES
    )
    zero: bool = own(False, "each process keeps and steps its share of the optimizer's statistics, and no more")
    hierarchy: Mapping[Period, GroupSize] = own(
        {}, "with local updates: after every so many steps, average in groups of so many: {2: 2, 4: 4}"
    )
    timeout: float = own(60.0, "seconds of silence after which a process of the site is taken for broken", gt=0)

    @field_validator("hierarchy")
    @classmethod
    def _ascending(cls, hierarchy: Mapping[int, int]) -> Mapping[int, int]:
        return dict(sorted(hierarchy.items()))

    @model_validator(mode="after")
    def _consistent(self) -> SiteSettings:
        if self.zero and self.processes == 1:
            raise Conflict("zero", "zero shares the optimizer among a site's processes; set processes to 2 or more")
        if self.hierarchy:
            check_hierarchy(self.hierarchy, self.processes)
        return self


def check_hierarchy(hierarchy: Mapping[int, int], processes: int) -> None:
    """Refuses levels that are no groups of groups, the last of which is the whole site. Periods are ascending."""
    for (period, size), (longer, larger) in pairwise(hierarchy.items()):
        if larger <= size or larger % size:
            raise Conflict(
                f"hierarchy.{longer}",
                f"groups of {larger} every {longer} steps cannot be made of the groups of {size} that average every "
                f"{period}; make each size a multiple of the one before",
            )
    period, size = list(hierarchy.items())[-1]
    if size != processes:
        raise Conflict(
            f"hierarchy.{period}",
            f"the longest period averages groups of {size} in a site of {processes}; the last group is the whole site: "
            "make the last size equal to local.site.processes",
        )


def check_site(recipe: Recipe) -> None:
    """Refuses a site that contradicts how the run averages or what it computes on."""
    local, site = recipe.local, recipe.local.site
    if site.hierarchy and not recipe.local_updates.enabled:
        raise Conflict(
            "local.site.hierarchy",
            "without local updates the processes of a site never differ, so there is nothing to average in levels; "
            "remove hierarchy, or join a run with local_updates.enabled: true",
        )
    if site.hierarchy and site.zero:
        raise Conflict(
            "local.site.zero",
            "with a hierarchy each process steps a model of its own and needs all statistics for it, so there are no "
            "shares; remove zero, or hierarchy",
        )
    if site.hierarchy and recipe.local.offload_optimizer:
        raise Conflict(
            "local.offload_optimizer",
            "with a hierarchy each process steps the model itself, not a copy in host memory; remove one of the two",
        )
    if site.zero and recipe.offloaded:
        why = "delay" if recipe.delay.step else "local.offload_optimizer"
        raise Conflict(
            "local.site.zero",
            f"zero leaves no whole optimizer that {why} could keep in host memory; remove zero"
            + ("" if recipe.delay.step else ", or offload_optimizer"),
        )
    if site.processes > 1 and (local.device == "mps" or ":" in local.device):
        raise Conflict(
            "local.device",
            f"{local.device} is one device, and the site has {site.processes} processes; write cuda (a device for "
            "each process), cpu or auto",
        )
