"""Where a site goes on when it is started again: the state of its last epochs, in the directory `site` of its home.

With a sharded optimizer every rank writes and reads its share; otherwise rank 0 has all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from swarmcli.checkpoints.layout import checkpoints_below, epoch_of
from swarmcli.checkpoints.shelf import Keep
from swarmcli.errors import CheckpointError
from swarmcli.peer.checkpoints import BackgroundCheckpoints, not_saved, store_of
from swarmcli.peer.collaboration import Collaboration
from swarmcli.sharding.zero import ZeroRedundancyOptimizer
from swarmcli.sites.checkpoint import SiteShards
from swarmcli.sites.commands import LeaderCommands
from swarmcli.sites.sharded_optimizer import SiteOptimizer
from swarmcli.sites.site import Site
from swarmcli.training import Checkpoint, CheckpointStore, load_checkpoint
from swarmcli.training.shares import load_newest

logger = logging.getLogger(__name__)

LAST = "site"  # the directory of the last states


class SiteState:
    """Rank 0's side. `close` it before the site ends."""

    def __init__(self, collaboration: Collaboration, site: Site, commands: LeaderCommands) -> None:
        """`site`: the ranks that share the optimizer, if it is sharded; they are told what to do by `commands`."""
        peer, inner = collaboration.peer, collaboration.optimizer.opt
        self._collaboration, self._site, self._home = collaboration, site, peer.home.path
        self._run_id = peer.recipe.run_id
        self._last = CheckpointStore(self._home / LAST, self._run_id, keep=Keep(newest=2))
        self._sharded: ZeroRedundancyOptimizer | None = None
        self._shards: SiteShards | None = None
        self._saving: BackgroundCheckpoints | None = None
        self._ended = False  # the run has
        self._result: Path | None = None  # its checkpoint
        if isinstance(inner, SiteOptimizer):
            self._last.directory.mkdir(exist_ok=True)
            inner.statistics.spool = self._last.directory
            self._sharded = inner.zero
            self._shards = SiteShards(site, self._home, inner.zero, commands)

    def load(self, resume: Path | None, *, restarted: bool) -> None:
        """Goes on from the checkpoint `resume`, or else from the last state of a life before, unless somebody is there
        who stands as far; of a site that the launcher started again (`restarted`) from that in any case.

        Raises CheckpointError when `resume` cannot be used, or the last state cannot and nobody is there who hands out
        the run's.
        """
        last = list(reversed(self._last.shelf.all())) if restarted else []
        if not restarted and resume is None:
            last = checkpoints_below(self._home, self._run_id)
        elsewhere = (
            self._collaboration.optimizer.call(lambda core: core.epoch_elsewhere()) if last and not restarted else None
        )
        if elsewhere is not None and elsewhere >= epoch_of(last[0]):
            last = []
        try:
            # The checkpoint that a user named may be of another run: the user has said so.
            checkpoint = self._read(last, self._run_id) if last or not resume else self._read([resume], None)
        except CheckpointError as error:
            if not restarted and elsewhere is None:
                raise
            logger.warning("the site begins without its last state: %s", error)
            return
        if checkpoint is not None:
            self._collaboration.restore(checkpoint)

    def _read(self, places: Sequence[Path], run_id: str | None) -> Checkpoint | None:
        if self._sharded is not None:
            return load_newest(self._site, self._home, self._sharded, places, run_id)
        problems = []
        for place in places:
            try:
                return load_checkpoint(place, run_id)
            except CheckpointError as error:
                problems.append(str(error))
        if problems:
            raise CheckpointError("; ".join(problems))
        return None

    def saving(self) -> BackgroundCheckpoints:
        """Writes every epoch, beside training. To be made before the run is joined."""
        model, optimizer = self._collaboration.model, self._collaboration.optimizer
        self._saving = BackgroundCheckpoints(
            self._last, model, optimizer, 1, shards=self._shards, path=self._collaboration.resumed
        )
        return self._saving

    def forget_later(self) -> None:
        """Removes states of epochs that this peer, which has come into step with the run, has not reached."""
        self._last.remove_after(self._collaboration.optimizer.local_epoch)

    def write_final(self) -> None:
        """The checkpoint of a run that has ended, into the home."""
        store, optimizer = store_of(self._collaboration), self._collaboration.optimizer
        state, epoch = optimizer.state_dict(), optimizer.local_epoch
        if self._shards is not None:
            self._shards.copy()
        self._result = store.write(self._collaboration.model, state, epoch, shards=self._shards)
        self._ended = True
        if self._result is not None:
            self._collaboration.peer.saved = f"saved epoch {epoch} at {self._result}"

    def require_result(self) -> None:
        """To be called when the site has been left. Raises CheckpointError if its last state was not written, or the
        run's result."""
        if self._ended and self._result is None:
            raise not_saved(self._home / "checkpoints")
        if not self._ended and self._saving is not None and self._saving.failed:
            raise not_saved(self._last.directory)

    def close(self) -> None:
        if self._shards is not None:
            self._shards.close()


def load_share(site: Site, home: Path, optimizer: ZeroRedundancyOptimizer) -> None:
    """At the other ranks, while rank 0 is in `SiteState.load`. Raises SiteError."""
    with suppress(CheckpointError):  # whether that is the end is for rank 0 to say, who knows the same
        load_newest(site, home, optimizer)
