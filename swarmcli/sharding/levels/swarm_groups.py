"""Options of hierarchical averaging in a swarm: where a peer is in the hierarchy, and how it finds the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarmcli.averaging import AllreduceOptions, AveragerConfig, MatchmakingOptions
from swarmcli.averaging.checks import check_text
from swarmcli.compression import CompressionBase, NoCompression
from swarmcli.sharding.levels.plan import LevelPlan

if TYPE_CHECKING:
    from swarmcli.dht import DHT

EVERYONE = "everyone"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmGroups:
    """The groups of a peer: at the last level everyone, at the level before all with the same first name in `place`,
    and so on.

        SwarmGroups(dht=dht, prefix="run", place="europe/paris")

    is in a group with the others in europe/paris, in one with all of europe, and in one with everybody. Peers with
    fewer levels than others meet them at the levels that they share.
    """

    dht: DHT
    prefix: str  # of the run: what all group keys begin with
    place: str = ""  # this peer's groups from the widest to the narrowest: a name for each level but the last
    matchmaking_time: float = 5.0  # seconds to look for others at most, while not everyone is there
    averaging_timeout: float | None = None  # seconds that a round may take once the group is there; None: adaptive
    compression: CompressionBase = field(default_factory=NoCompression)
    bandwidth: float | None = None  # share of the reducing work; None: as measured in past rounds; 0: reduces nothing

    def names(self, plan: LevelPlan) -> tuple[str, ...]:
        """(levels,) the names of this peer's groups, in the order of the plan. Raises TypeError, and ValueError unless
        `place` has one name for each level but the last."""
        if not isinstance(self.place, str):
            raise TypeError(f"place={self.place!r}: expected a text such as 'europe/paris'")
        parts = self.place.split("/") if self.place else []
        if not all(parts):
            raise ValueError(f"place={self.place!r}: a name of a group is not empty")
        if len(parts) != len(plan) - 1:
            names = ["europe", "paris", *(f"rack-{number}" for number in range(1, len(plan)))]
            example = "/".join(names[: len(plan) - 1])
            raise ValueError(
                f"place={self.place!r} has {len(parts)} names for {len(plan)} levels; give one for each level but the "
                f"last, which is everyone, the widest first, as {example!r}"
            )
        return tuple("/".join(parts[: len(plan) - 1 - level]) for level in range(len(plan)))

    def configs(self, plan: LevelPlan) -> list[AveragerConfig]:
        """(levels,) the options of each level's averager; that of the last level shares the state. Raises ValueError
        and TypeError for options that make no sense."""
        check_text(prefix=self.prefix)
        names = self.names(plan)
        return [self._config(name, size) for name, size in zip(names, plan.group_sizes, strict=True)]

    def _config(self, name: str, size: int | None) -> AveragerConfig:
        return AveragerConfig(
            prefix=f"{self.prefix}/{name}",
            run=self.prefix,
            matchmaking=MatchmakingOptions(size, min_matchmaking_time=self.matchmaking_time),
            allreduce=AllreduceOptions(self.compression, allreduce_timeout=self.averaging_timeout),
            bandwidth=self.bandwidth,
            share_state=False if name else None,
        )
