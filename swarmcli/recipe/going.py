"""How a run goes, by the word of the peer that handed out its recipe: for estimates of what a newcomer will take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Going:
    """0 is unknown: the time of an epoch, or, where all three are 0, who takes part."""

    epoch_seconds: float = 0.0
    trainers: int = 0
    monitors: int = 0
    auxiliaries: int = 0


UNKNOWN = Going()
