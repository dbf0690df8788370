"""How much of a computer one peer takes, where that is steered: link, threads, pace, graphics card and disk."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from swarmcli.machine.registry import LocalPeers
from swarmcli.machine.sensors import bytes_below
from swarmcli.peer.governor import PeerShare
from swarmcli.peer.processors import ProcessorShare
from swarmcli.recipe import HuggingFaceDataset, Recipe
from swarmcli.recipe.limit_store import LimitStore
from swarmcli.recipe.limits import amount_of
from swarmcli.training.loop import ComputePace

CPU = torch.device("cpu")


class Lending:
    """One peer's share, which its governor steers, from any thread."""

    def __init__(
        self, limit_rates: Callable[[float | None, float | None], object], processors: ProcessorShare, pace: ComputePace
    ) -> None:
        self._limit_rates = limit_rates
        self._processors = processors
        self._device = CPU
        self._share = PeerShare()
        self._rates_changed: Callable[[float], object] = bool
        self.pace = pace

    def when_rates_change(self, heed: Callable[[float], object]) -> None:
        """From now on `heed` is called in the governor's thread after each change of the link's limits, and once now:
        with by how much what the user has set is divided."""
        self._rates_changed = heed
        heed(self._share.divided)

    def compute_on(self, device: torch.device) -> None:
        """Says which device the trainer of this process computes on."""
        self._device = device
        self._apply_to_device()

    def take(self, share: PeerShare) -> None:
        """From now on this peer takes so much."""
        if (share.upload, share.download) != (self._share.upload, self._share.download):
            self._limit_rates(share.upload, share.download)
            self._rates_changed(share.divided)
        self._share = share
        self._apply_to_device()

    def _apply_to_device(self) -> None:
        on_card = self._device.type != "cpu"
        self.pace.share = self._share.gpu if on_card else self._share.processor


def room_for(limits: LimitStore, recipe: Recipe, home: Path) -> float:
    """Bytes that this peer may still write, by its user's limit; infinite without one."""
    limit = limits.limits.disk
    if limit is None:
        return math.inf
    peers = len({each.home for each in LocalPeers().living()} | {str(home.absolute())})
    most = amount_of(limit, psutil.disk_usage(str(home)).total) or 0.0
    return most / peers - sum(map(bytes_below, files_of(recipe, home)))


def files_of(recipe: Recipe, home: Path) -> list[Path]:
    """The places that count towards the limit: the peer's own directory, and where the library `datasets` keeps what it
    downloads for this recipe, by its own variables."""
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
