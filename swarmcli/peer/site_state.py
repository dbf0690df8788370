"""Where a site goes on when it is started again: the state of its last epochs, in the directory `site` of its home.

Rank 0 reads and writes checkpoints like those of a single process. With a sharded optimizer, statistics then travel
from and to the other ranks (swarmcli/sites/statistics.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarmcli.checkpoints.directory import Keep
from swarmcli.checkpoints.layout import checkpoints_below
from swarmcli.events import Noticed
from swarmcli.peer.checkpoints import BackgroundCheckpoints, not_saved, store_of
from swarmcli.peer.collaboration import Collaboration
from swarmcli.sharding.zero.state import copied_to_cpu
from swarmcli.sites.sharded_optimizer import SiteOptimizer
from swarmcli.training import CheckpointStore, load_checkpoint

LAST = "site"  # the directory of the last states
MOST_COPYING = 0.1  # of a site's time, in which its ranks wait; if copies would take more, epochs are left out


class SiteState:
    """For rank 0, while the other ranks wait for its commands."""

    def __init__(self, collaboration: Collaboration) -> None:
        peer, inner = collaboration.peer, collaboration.optimizer.opt
        self._collaboration, self._home, self._run_id = collaboration, peer.home.path, peer.recipe.run_id
        self._last = CheckpointStore(self._home / LAST, self._run_id, keep=Keep(newest=2))
        self._saving: BackgroundCheckpoints | None = None
        self._ended = False  # whether the run has ended
        self._result: Path | None = None  # the checkpoint of the run that has ended
        self._copy: Callable[[dict[str, Any]], dict[str, Any]] = copied_to_cpu
        if isinstance(inner, SiteOptimizer):
            self._last.directory.mkdir(exist_ok=True)
            inner.statistics.spool = self._last.directory
            self._copy = lambda state: state  # the state is a copy already, in a file

    def load(self, resume: Path | None, *, restarted: bool) -> None:
        """Goes on from its own checkpoints as any trainer does (`Collaboration.resume_own`), or from the checkpoint
        `resume`, unless the launcher started the site again (`restarted`) after it had saved a state.

        Raises CheckpointError when `resume` cannot be used, or when no own checkpoint can and no peer is there that
        hands out the run's state.
        """
        if resume is None or (restarted and checkpoints_below(self._home, self._run_id)):
            self._collaboration.resume_own()
        else:  # it may be of another run, if the user has said so
            self._collaboration.restore(load_checkpoint(resume))

    def saving(self) -> BackgroundCheckpoints:
        """Writes every epoch, beside training. To be made before the run is joined."""
        model, optimizer = self._collaboration.model, self._collaboration.optimizer
        self._saving = BackgroundCheckpoints(
            self._last, model, optimizer, 1, copy=self._copy, path=self._collaboration.resumed
        )
        return self._saving

    def forget_later(self) -> None:
        """Removes states of epochs that this peer, now in step with the run, has not reached."""
        self._last.remove_after(self._collaboration.optimizer.local_epoch)

    def write_final(self) -> None:
        """Writes the checkpoint of a run that has ended into the home."""
        peer, optimizer = self._collaboration.peer, self._collaboration.optimizer
        store, epoch = store_of(self._collaboration), optimizer.local_epoch
        self._ended = True
        try:
            self._result = store.write(self._collaboration.model, optimizer.state_dict(), epoch)
        except OSError as error:  # while the statistics were copied
            peer.events.emit(Noticed("warning", f"the state of epoch {epoch} was not saved: {error}"))
        if self._result is not None:
            peer.saved = f"saved epoch {epoch} at {self._result}"

    def require_result(self) -> None:
        """To be called after the site was left. Raises CheckpointError if its last state, or the run's result, was not
        written."""
        if self._ended and self._result is None:
            raise not_saved(self._home / "checkpoints")
        if not self._ended and self._saving is not None and self._saving.failed:
            raise not_saved(self._last.directory)


def rationed(
    work: Callable[[], object], share: float = MOST_COPYING, clock: Callable[[], float] = time.monotonic
) -> Callable[[], None]:
    """Returns `work` as a function that does nothing if it would take more than this share of the time."""
    rests_until = -math.inf

    def run() -> None:
        nonlocal rests_until
        if (began := clock()) >= rests_until:
            work()
            ended = clock()
            rests_until = ended + (ended - began) / share

    return run
