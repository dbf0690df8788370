"""What of a computer's limits is one peer's, and what of its whole.

Rates and sizes are divided by the peers of this user on the computer. Shares of time are not: the processors' threads
are divided among the trainers already, so each may compute half of the time where half of the processors are lent. A
graphics card is there for one at a time, so its time is divided.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmcli.machine.sensors import Readings
from swarmcli.network.rates import LEAST_RATE
from swarmcli.recipe.limits import Limits


@dataclass(frozen=True, slots=True)
class PeerShare:
    """Of one peer. None: no limit."""

    upload: float | None = None  # bytes per second
    download: float | None = None
    threads: int | None = None  # of all trainers of this computer, which divide them by themselves
    processor: float = 1.0  # of the time
    gpu: float = 1.0
    gpu_memory: float | None = None  # bytes; up to 1, a share of what the card has
    divided: float = 1.0  # the lower rate that the user has set, by this peer's: several peers have it together


def share_of(limits: Limits, readings: Readings) -> PeerShare:
    """With fewer bytes per second than a peer needs it would be lost to the run, so each keeps that much."""

    def rate(limit: float | None) -> float | None:
        return None if limit is None else max(LEAST_RATE, limit / readings.peers)

    memory = limits.gpu_memory
    lower = min(filter(None, (limits.upload, limits.download)), default=None)
    return PeerShare(
        upload=rate(limits.upload),
        download=rate(limits.download),
        threads=limits.threads,
        processor=limits.processor or 1.0,
        gpu=(limits.gpu or 1.0) / (readings.trainers if limits.gpu else 1),
        gpu_memory=None if memory is None else memory / readings.trainers,
        divided=1.0 if lower is None else lower / (rate(lower) or lower),
    )
