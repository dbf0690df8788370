"""How much of the disk a peer may still write, and what counts towards that."""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil

from swarmcli.machine.registry import LocalPeers
from swarmcli.machine.sensors import bytes_below
from swarmcli.recipe import HuggingFaceDataset, Recipe
from swarmcli.recipe.limit_store import LimitStore
from swarmcli.recipe.limits import amount_of


def room_for(limits: LimitStore, recipe: Recipe, home: Path) -> float:
    """Returns how many bytes this peer may still write within its user's limit; infinite without one."""
    limit = limits.limits.disk
    if limit is None:
        return math.inf
    peers = len({each.home for each in LocalPeers().living()} | {str(home.absolute())})
    most = amount_of(limit, psutil.disk_usage(str(home)).total) or 0.0
    return most / peers - sum(map(bytes_below, files_of(recipe, home)))


def files_of(recipe: Recipe, home: Path) -> list[Path]:
    """Returns the places that count towards the limit: the peer's own directory, and where the library `datasets` keeps
    what it downloads for this recipe, as the library's own variables say."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    base = Path(os.environ.get("HF_HOME", cache / "huggingface"))
    prepared = Path(os.environ.get("HF_DATASETS_CACHE", base / "datasets")).expanduser()
    downloaded = Path(os.environ.get("HF_HUB_CACHE", base / "hub")).expanduser()
    read = [*recipe.datasets, recipe.evaluation.dataset]
    names = [each.path for each in read if isinstance(each, HuggingFaceDataset) and "/" in each.path]
    caches = (
        place
        for name in dict.fromkeys(names)
        for place in (prepared / name.replace("/", "___"), downloaded / f"datasets--{name.replace('/', '--')}")
    )
    return [home, *caches]
