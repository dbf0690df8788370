"""When an epoch is over: by the count of the one group that all peers are in, or by everyone's reports.

With `target_group_size` the number of peers decides which, and it changes while a run goes on. Each peer goes by its
own count until a round begins. Where counts differ that costs moments: a leader that sums up samples also begins when a
member says that the reports suffice. What the round means for the lineage its members decide together (told.py). Where
two groups decide differently, their lineages part, and the rule for lineages brings them together again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarmcli.optim.membership.lineage import Standing
    from swarmcli.optim.progress.tracker import ProgressTrackerCore

CALM = 30.0  # seconds without more peers than one group may hold, after which one group ends the epochs again
LEFT_BEHIND = 1.0  # seconds for which a peer looks for others that are left over, once the rest has gone on


class EpochRule(Protocol):
    """Asked by one peer about its own epoch. `samples` are its own, towards the next round."""

    def told(self, samples: int) -> float:
        """What the leader of the standing group hears; it begins the round when its members' sum reaches the target."""

    def suffices(self, samples: int) -> bool:
        """Whether this peer may end the epoch although no round begins."""

    @property
    def asks_around(self) -> bool:
        """Whether it looks for others first, and waits for them if there are any."""

    def excuses(self, own: Standing, leading: Standing) -> bool:
        """Whether it may stay on its way although another standing leads."""

    @property
    def several(self) -> bool:
        """Whether, as far as this peer can tell, several groups end the epoch."""


class OneGroup:
    """All peers of a lineage average with each other, so their leader knows what all of them have."""

    asks_around = True
    several = False

    def __init__(self, target_batch_size: int) -> None:
        self._target = target_batch_size

    def told(self, samples: int) -> float:
        return samples

    def suffices(self, samples: int) -> bool:
        return samples >= self._target

    def excuses(self, own: Standing, leading: Standing) -> bool:
        return False


class SeveralGroups:
    """A group holds a part of the run only, so the progress reports say when the epoch is over.

    Groups end it one after the other, within moments. A peer that is left over, since the groups are full, steps with
    its own gradients when nobody has come for `patience` seconds; the averaging of states brings it back.
    """

    asks_around = False
    several = True

    def __init__(self, tracker: ProgressTrackerCore, patience: float, now: Callable[[], float]) -> None:
        """`now` is loop time."""
        self._tracker = tracker
        self._patience = patience
        self._now = now
        self._over: tuple[int, float] | None = None  # which epoch has been seen to be over, and since when

    def told(self, samples: int) -> float:
        return self._tracker.target_batch_size if self._is_over() else 0.0

    def suffices(self, samples: int) -> bool:
        if not self._is_over() or self._over is None:
            return False
        epoch, since = self._over
        patience = min(LEFT_BEHIND, self._patience) if self._tracker.global_epoch > epoch else self._patience
        return self._now() - since >= patience

    def excuses(self, own: Standing, leading: Standing) -> bool:
        """Another group has ended this epoch a moment earlier."""
        return leading == own.by_epoch(self._tracker.target_batch_size)

    def _is_over(self) -> bool:
        epoch = self._tracker.local_progress.epoch
        if self._over is not None and self._over[0] == epoch:
            return True
        if self._tracker.accumulated_enough_samples or self._tracker.global_epoch > epoch:
            self._over = epoch, self._now()
            return True
        return False


class AsManyAsFit:
    """One group while all peers fit into it (target_group_size), otherwise several."""

    def __init__(
        self, one: OneGroup, several: SeveralGroups, size: int, count: Callable[[], int], now: Callable[[], float]
    ) -> None:
        """`count` gives the peers that are there, this one too; `now` is loop time."""
        self._rules = one, several
        self._size = size
        self._count = count
        self._now = now
        self._crowded_at = -math.inf  # when there were last more than fit into one group

    @property
    def several(self) -> bool:
        """It takes a download by everyone to be one group again, so a peer that comes and goes must not cause it."""
        if self._count() > self._size:
            self._crowded_at = self._now()
        return self._now() - self._crowded_at < CALM

    @property
    def _rule(self) -> EpochRule:
        return self._rules[self.several]

    @property
    def asks_around(self) -> bool:
        return self._rule.asks_around

    def told(self, samples: int) -> float:
        return self._rule.told(samples)

    def suffices(self, samples: int) -> bool:
        return self._rule.suffices(samples)

    def excuses(self, own: Standing, leading: Standing) -> bool:
        return self._rule.excuses(own, leading)
