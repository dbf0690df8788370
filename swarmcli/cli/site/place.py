"""Where this process stands in a site, as the launcher that started it says: torch's, under `swarm` or by itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from swarmcli.errors import SiteError


@dataclass(frozen=True, slots=True)
class Place:
    """One process of a site."""

    rank: int
    size: int
    local_rank: int  # among the processes of this machine


def place_of_process(environment: Mapping[str, str] | None = None) -> Place | None:
    """What the environment says; None for a process that is no part of a site. Raises SiteError for half of it."""
    given = os.environ if environment is None else environment
    if "RANK" not in given or given.get("WORLD_SIZE", "1") == "1":
        return None
    try:
        return Place(int(given["RANK"]), int(given["WORLD_SIZE"]), int(given.get("LOCAL_RANK", "0")))
    except ValueError:
        raise SiteError(
            f"RANK={given['RANK']!r} and WORLD_SIZE={given['WORLD_SIZE']!r} in the environment are no numbers; "
            "start this with torchrun, or unset them"
        ) from None
