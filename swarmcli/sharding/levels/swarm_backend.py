"""Averaging within the groups of a swarm for programs without coroutines. A thin shell over SwarmLevels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swarmcli.averaging.shell import CoreRunner
from swarmcli.sharding.levels.level import LevelAverage, Places
from swarmcli.sharding.levels.plan import LevelPlan
from swarmcli.sharding.levels.swarm_groups import SwarmGroups
from swarmcli.sharding.levels.swarm_levels import SwarmLevels

SHUTDOWN_TIMEOUT = 5.0  # seconds


class SwarmBackend:
    """Runs SwarmLevels on the loop thread that everything of the process shares."""

    def __init__(self, groups: SwarmGroups, plan: LevelPlan) -> None:
        """Raises what SwarmLevels raises, and RuntimeError for a DHT that does not run."""
        levels = SwarmLevels(groups, plan)
        if not groups.dht.is_alive():
            raise RuntimeError("the DHT of SwarmGroups is not running; make it with start=True")

        async def make() -> SwarmLevels:
            return levels

        self._runner: CoreRunner[SwarmLevels] = CoreRunner(
            f"hierarchical averaging of {groups.prefix!r}", SHUTDOWN_TIMEOUT
        )
        self._runner.start(make, wait=True, timeout=None)

    def take_step(
        self, tensors: Sequence[torch.Tensor], step: int, places: Places = None
    ) -> tuple[int, LevelAverage | None]:
        """See SwarmLevels.take_step. Waits for the round; other threads leave the tensors alone meanwhile."""
        taken: tuple[int, LevelAverage | None] = self._runner.run(
            lambda levels: levels.take_step(tensors, step, places)
        )
        return taken

    def average(self, level: int, tensors: Sequence[torch.Tensor], step: int, places: Places = None) -> LevelAverage:
        """See SwarmLevels.average. Waits likewise."""
        average: LevelAverage = self._runner.run(lambda levels: levels.average(level, tensors, step, places))
        return average

    def download(self, tensors: Sequence[torch.Tensor], timeout: float | None, places: Places = None) -> int | None:
        """See SwarmLevels.download."""
        step: int | None = self._runner.run(lambda levels: levels.download(tensors, timeout, places))
        return step

    def shutdown(self) -> None:
        self._runner.shutdown()
