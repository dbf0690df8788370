"""When an epoch is over: by the count of the one group that all peers are in, or by everyone's reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarmcli.optim.progress.tracker import ProgressTrackerCore

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

    def excuses(self, epochs: int) -> bool:
        """Whether it may stay on its way although others are so many epochs ahead."""


class OneGroup:
    """All peers of a lineage average with each other, so their leader knows what all of them have."""

    asks_around = True

    def __init__(self, target_batch_size: int) -> None:
        self._target = target_batch_size

    def told(self, samples: int) -> float:
        return samples

    def suffices(self, samples: int) -> bool:
        return samples >= self._target

    def excuses(self, epochs: int) -> bool:
        return False


class SeveralGroups:
    """A group holds a part of the run only (target_group_size), so the progress reports say when the epoch is over.

    Groups end it one after the other, within moments. A peer that is left over, since the groups are full, steps with
    its own gradients when nobody has come for `patience` seconds; the averaging of states brings it back.
    """

    asks_around = False

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

    def excuses(self, epochs: int) -> bool:
        return epochs <= 1

    def _is_over(self) -> bool:
        epoch = self._tracker.local_progress.epoch
        if self._over is not None and self._over[0] == epoch:
            return True
        if self._tracker.accumulated_enough_samples or self._tracker.global_epoch > epoch:
            self._over = epoch, self._now()
            return True
        return False
