"""Where a site goes on when it is started again: the state of its last epochs, in the directory `site` of its home.

With a sharded optimizer every rank writes and reads its share; otherwise rank 0 has all of it. A checkpoint that is
read may be of a site with any number of ranks or of a single process, and lie where all ranks see it or, if it was
written on several machines, in parts where the parts were written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from swarmcli.checkpoints.directory import Keep
from swarmcli.checkpoints.layout import (
    MANIFEST,
    SHARDED_FORMAT,
    SHARDS,
    TRAINING,
    checkpoints_below,
    epoch_of,
    file_digest,
    read_manifest,
)
from swarmcli.errors import CheckpointError
from swarmcli.files.flat import unflatten
from swarmcli.files.tensor_file import TensorFile
from swarmcli.peer.checkpoints import BackgroundCheckpoints, not_saved, store_of
from swarmcli.peer.collaboration import Collaboration
from swarmcli.sharding.files.reshard import reshard
from swarmcli.sharding.files.save import MANIFEST as SHARDS_MANIFEST
from swarmcli.sharding.files.save import load_save, seal, unseal
from swarmcli.sharding.transfer import agree
from swarmcli.sharding.zero import ZeroRedundancyOptimizer
from swarmcli.sites.checkpoint import SiteShards
from swarmcli.sites.commands import LeaderCommands
from swarmcli.sites.links import named
from swarmcli.sites.sharded_optimizer import SiteOptimizer
from swarmcli.sites.site import Site
from swarmcli.training import Checkpoint, CheckpointStore, load_checkpoint
from swarmcli.training.checkpoint import read_shards

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
        """Goes on from the checkpoint `resume`, or else from the last state of a life before, unless a peer is there
        that stands as far; a site that the launcher started again (`restarted`) does so in any case.

        Raises CheckpointError when `resume` cannot be used, or the last state cannot and no peer is there that hands
        out the run's.
        """
        last = list(reversed(self._last.checkpoints.all())) if restarted else []
        if not restarted and resume is None:
            last = checkpoints_below(self._home, self._run_id)
        elsewhere = (
            self._collaboration.optimizer.call(lambda core: core.succession.furthest())
            if last and not restarted
            else None
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
    with suppress(CheckpointError):  # rank 0 knows the same, and says whether that is the end
        load_newest(site, home, optimizer)


class Chosen(msgspec.Struct, frozen=True):
    """The checkpoint that rank 0 would have everyone read."""

    path: str  # at rank 0; empty: there is none to read
    place: str  # in the site's home; empty: elsewhere
    digest: str  # of its checkpoint.json
    shards: bytes  # the manifest of its shards; empty: a single process wrote it


NONE = Chosen("", "", "", b"")


def load_newest(
    site: Site,
    home: Path,
    optimizer: ZeroRedundancyOptimizer,
    checkpoints: Iterable[Path] = (),
    run_id: str | None = None,
) -> Checkpoint | None:
    """Reads the first of rank 0's `checkpoints` that can be used; all main threads call it, the others without any.

    Every rank then has its share of the statistics in `optimizer`, and rank 0 gets the checkpoint, whose model and
    optimizer state (with the share of rank 0) it has to restore; the others get None, and rank 0 too where there is
    none. `home` is the site's directory on this machine, where the other ranks look for what rank 0 has in its own.

    Raises CheckpointError at all ranks, with nothing changed, if there are checkpoints and none can be used; it says
    what is wrong with each. SiteError when a rank is gone.
    """
    waiting = iter(checkpoints)
    problems: list[str] = []
    while True:
        checkpoint, chosen = _choose(waiting, home, run_id, problems) if site.rank == 0 else (None, NONE)
        chosen = site.share(Chosen, chosen)
        if not chosen.path:
            break
        try:
            with named("the ranks of the site did not read a checkpoint together"):
                _load(site, home, optimizer, chosen)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            logger.warning("%s was loaded instead of a newer checkpoint: %s", chosen.path, problem)
        if checkpoint is not None:
            checkpoint.optimizer["state"] = {i: dict(values) for i, values in optimizer.local_state().items()}
        return checkpoint
    told = site.share(list[str], problems)
    if told:
        raise CheckpointError(f"no checkpoint can be used: {'; '.join(told)}")
    return None


def _choose(
    waiting: Iterable[Path], home: Path, run_id: str | None, problems: list[str]
) -> tuple[Checkpoint | None, Chosen]:
    for path in waiting:
        try:
            checkpoint = load_checkpoint(path, run_id, whole=False)
            manifest = read_manifest(path)
            shards = seal(read_shards(path, manifest)) if manifest["format"] == SHARDED_FORMAT else b""
            place = path.relative_to(home).as_posix() if path.is_relative_to(home) else ""
            return checkpoint, Chosen(str(path), place, file_digest(path / MANIFEST), shards)
        except (CheckpointError, OSError) as error:
            problems.append(str(error))
    return None, NONE


def _load(site: Site, home: Path, optimizer: ZeroRedundancyOptimizer, chosen: Chosen) -> None:
    meet = partial(site.meet, timedelta(hours=1))  # a rank waits for the others, which read and check their parts
    places = [Path(chosen.path), *([home / chosen.place] if chosen.place else [])]
    if chosen.shards:
        manifest = unseal(chosen.shards, Path(chosen.path, SHARDS, SHARDS_MANIFEST))
        load_save([place / SHARDS for place in places], manifest, optimizer, site.pace, meet=meet)
        return
    with ExitStack() as stack:
        held: Mapping[int, Mapping[str, Any]] = {}
        problem = None
        try:
            for place in places:
                if (place / MANIFEST).is_file() and file_digest(place / MANIFEST) == chosen.digest:
                    held = _statistics(place, optimizer.parameters, stack)
                    break
        except CheckpointError as error:
            problem = str(error)
        agree(problem, site.pace)
        optimizer.install_state(reshard(held, optimizer.indices_of(optimizer.rank), site.pace, meet=meet))


def _statistics(path: Path, parameters: Sequence[Tensor], stack: ExitStack) -> Mapping[int, Mapping[str, Any]]:
    """The statistics in a single process's checkpoint, by parameter; views of the file while the stack is open."""
    try:
        file = stack.enter_context(TensorFile(path / TRAINING))
        found = unflatten(read_manifest(path)["optimizer"].get("state", {}), file.tensor)
        for index, statistics in found.items():
            for name, value in statistics.items():
                if isinstance(value, Tensor) and value.numel() > max(1, parameters[index].numel()):
                    raise ValueError(f"{index}/{name} is larger than its parameter")
    except (OSError, LookupError, AttributeError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged, or of another model: {error}; use an older checkpoint") from error
    return dict(found)
