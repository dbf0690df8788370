"""The few values that the parts of a peer are built with: the run's options, and the peer itself."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from swarmcli.averaging import AveragerConfig
from swarmcli.averaging.checks import as_count, check_flags, check_numbers, check_text
from swarmcli.version import build

if TYPE_CHECKING:
    from swarmcli.dht import DHTNode
    from swarmcli.events import Events

IDLE_WAIT = 1.0  # seconds for which a step without samples waits for the epoch's end before it returns

Role = Literal["trainer", "auxiliary", "monitor"]


@dataclass(frozen=True, slots=True)
class PeerDescription:
    """A peer's own description. All of it is public; texts beyond 64 characters are cut."""

    role: Role = "trainer"
    name: str = ""
    device: str = "cpu"
    team: str = ""
    version: str = field(default_factory=build)  # of swarm


@dataclass(frozen=True, slots=True)
class RefreshOptions:
    """How often this peer reads the progress keys: the sooner the epoch ends, the more often, within the bounds.
    Periods and expirations are seconds."""

    min_refresh_period: float = 0.5
    max_refresh_period: float = 10.0
    default_refresh_period: float = 3.0  # while nobody else is there
    expected_drift_peers: float = 3.0  # this many peers may join before the epoch ends …
    expected_drift_rate: float = 0.2  # … or this fraction of those that are there
    metadata_expiration: float = 60.0  # of a report, which is repeated after half of that

    def __post_init__(self) -> None:
        for name in ("min_refresh_period", "max_refresh_period", "default_refresh_period", "metadata_expiration"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a positive number of seconds")
        if self.min_refresh_period > self.max_refresh_period:
            raise ValueError(
                f"min_refresh_period={self.min_refresh_period} is above max_refresh_period={self.max_refresh_period}"
            )
        if self.expected_drift_peers < 0 or self.expected_drift_rate < 0:
            raise ValueError("expected_drift_peers and expected_drift_rate: expected numbers that are not negative")


@dataclass(frozen=True)
class OptimizerConfig:
    """What the peers of a run agree on, and how long one of them waits. Times are seconds and upper bounds."""

    run_id: str  # peers with the same one train together
    target_batch_size: int  # samples of all peers together that make an epoch
    matchmaking_time: float = 15.0  # how long the end of an epoch waits for others that should be in its round
    averaging_timeout: float = 60.0  # to try a failed round again; also of one try, more on slow lines
    load_state_timeout: float = 600.0  # how long a newcomer looks for the state while nothing of it comes
    description: PeerDescription = field(default_factory=PeerDescription)  # what people see of this peer
    fingerprint: Mapping[str, str] = field(default_factory=dict)  # key → hash; groups admit only equal ones
    tracker: RefreshOptions = field(default_factory=RefreshOptions)
    performance_ema_alpha: float = 0.1
    client_mode: bool | None = None  # True: says that nobody can dial this peer; None: as the DHT
    proceed_alone: bool = False  # steps with its own gradients if no round comes about, although others are there
    verbose: bool = False  # the progress of the swarm goes to the log at level INFO

    def __post_init__(self) -> None:
        check_text(run_id=self.run_id)
        as_count(self.target_batch_size, "target_batch_size", least=1)
        check_flags(proceed_alone=self.proceed_alone)
        if not self.run_id:
            raise ValueError("run_id: expected a name, got an empty string")
        for name in ("matchmaking_time", "averaging_timeout", "load_state_timeout"):
            value = getattr(self, name)
            check_numbers(**{name: value})
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value!r}: expected a positive number of seconds")

    @cached_property
    def terms(self) -> str:
        """A digest of the fingerprint in 16 characters: equal for peers that may train together."""
        return hashlib.sha256(json.dumps(sorted(self.fingerprint.items())).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class PeerContext:
    """One peer of a run: its node of the network, the run's options, and how its rounds average gradients."""

    node: DHTNode
    config: OptimizerConfig
    averaging: AveragerConfig

    @property
    def events(self) -> Events:
        return self.node.endpoint.events
