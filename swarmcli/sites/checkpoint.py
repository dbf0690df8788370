"""The sharded optimizer state of a site in its checkpoints: every rank writes its share, beside training.

rank 0, main thread     copy ──────── CopyShares ───────▶ every rank copies its share at the same moment
rank 0, its writer      write ─────── WriteShares ──────▶ every rank begins to write its copy in a thread
                        (asks until all have ended) ────▶ LookAfterShares; the manifest, when all have written
                        settle ────── SettleShares ─────▶ the checkpoint has its name

Commands only ever wait for memory, never for a disk, so that steps are not held up by it.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from swarmcli.errors import CheckpointError, SiteError
from swarmcli.files.durable import discard, flush
from swarmcli.sharding.files.save import Written, complete, read_manifest, try_to_write
from swarmcli.sharding.transfer import exchange
from swarmcli.sharding.zero import ZeroRedundancyOptimizer
from swarmcli.sharding.zero.state import State, copied_to_cpu
from swarmcli.sites.commands import Command, LeaderCommands
from swarmcli.sites.links import named
from swarmcli.sites.site import Site

logger = logging.getLogger(__name__)


class CopyShares(Command, frozen=True):
    """Every rank copies its share, to write it later."""


class WriteShares(Command, frozen=True):
    """Every rank begins to write its copy into this directory of its home."""

    directory: str
    epoch: int


class LookAfterShares(Command, frozen=True):
    """Says whether all ranks have written; if they have, all make the save a whole one, or none."""


class SettleShares(Command, frozen=True):
    """On machines that do not share rank 0's directory: what `directory` holds is called `name` now (empty: goes), and
    what is called otherwise than those kept goes."""

    directory: str
    name: str
    kept: list[str]


class SiteShards:
    """One rank's hand in the checkpoints of its site: it has a share of the optimizer's state and a directory.

    Takes a copy of the share in host memory from `CopyShares` until it is written. At rank 0 `copy`, `write` and
    `settle` make all ranks do their part (see swarmcli.training.CheckpointStore); the others have `handlers`.
    """

    def __init__(
        self, site: Site, home: Path, optimizer: ZeroRedundancyOptimizer, commands: LeaderCommands | None = None
    ) -> None:
        """`home`: the site's directory on this machine; `optimizer`: sharded over the site's ranks; `commands`: at
        rank 0."""
        self._site, self.home = site, home
        self._optimizer = optimizer
        self._commands = commands
        self._copy: State = {}
        self._writer = ThreadPoolExecutor(1, "swarm-shards")
        self._writing: Future[Written] | None = None
        self._directory, self._epoch = home, 0

    def close(self) -> None:
        """Waits for what is being written."""
        self._writer.shutdown(wait=True)

    # Rank 0

    def copy(self) -> None:
        """All ranks copy their shares. To be called while the optimizer does not step; blocks. Raises SiteError."""
        self._lead.run(CopyShares(), self._copy_share)

    def write(self, directory: Path, epoch: int) -> str:
        """All ranks write their copies into `directory`; a digest of what they wrote. Blocks as long as their disks do.

        Raises CheckpointError if one could not, and SiteError if one is gone.
        """
        command = WriteShares(directory.relative_to(self.home).as_posix(), epoch)
        self._lead.run(command, lambda: self._begin(command))
        while (problem := self._lead.run(LookAfterShares(), self._look_after)) is None:
            time.sleep(0.2)
        if problem:
            raise CheckpointError(problem)
        return read_manifest(directory)[1].hex()

    def settle(self, directory: Path, name: str, kept: Sequence[str]) -> None:
        """`directory` is called `name` now, or was removed (empty); of the others those `kept` are left."""
        self._lead.run(SettleShares(directory.relative_to(self.home).as_posix(), name, list(kept)))

    @property
    def _lead(self) -> LeaderCommands:
        if self._commands is None:
            raise ValueError(f"rank {self._site.rank} writes its share when rank 0 says so")
        return self._commands

    # All ranks

    @property
    def handlers(self) -> Mapping[type[Command], Callable[[Any], None]]:
        """For the Follower of a rank other than 0."""

        def look_after(command: LookAfterShares) -> None:
            self._look_after()  # rank 0 says what is wrong

        return {
            CopyShares: lambda command: self._copy_share(),
            WriteShares: self._begin,
            LookAfterShares: look_after,
            SettleShares: self._settle,
        }

    def _copy_share(self) -> None:
        """The share as it is now, while nobody steps it."""
        self._copy = {index: copied_to_cpu(values) for index, values in self._optimizer.local_state().items()}

    def _begin(self, command: WriteShares) -> None:
        """Begins to write the copy; `_look_after` says when that has ended."""
        self._directory, self._epoch = self._place(command.directory), command.epoch
        copy, self._copy = self._copy, {}
        self._writing = self._writer.submit(try_to_write, self._directory, self._site.rank, copy)

    def _look_after(self) -> str | None:
        """Says what is wrong, "" if all ranks have written, None: not yet."""
        writing = self._writing
        if writing is None:
            raise SiteError("this rank was asked how it gets on with its share before it was told to write it")
        with named("not every rank of the site said whether it has written its share"):
            ended = all(exchange(bool, writing.done(), self._site.commands))
            if not ended:
                return None
            try:
                complete(self._directory, self._epoch, writing.result(), self._optimizer, self._site.commands)
            except CheckpointError as error:
                return str(error)
        return ""

    def _settle(self, command: SettleShares) -> None:
        """Does to the directories of this machine what rank 0 did to its own, if they are others."""
        partial = self._place(command.directory)
        try:
            if command.name and partial.is_dir():
                place = partial.with_name(PurePosixPath(command.name).name)
                discard(place)
                partial.rename(place)
                flush(place.parent)
            shutil.rmtree(partial, ignore_errors=True)
            if command.kept:
                for path in partial.parent.glob("epoch-*"):
                    if path.name not in command.kept:
                        discard(path)
                for path in partial.parent.glob(".epoch-*"):  # what a killed process left
                    shutil.rmtree(path, ignore_errors=True)
        except OSError as error:
            logger.warning("the shards of a checkpoint could not be put into their place: %s", error)

    def _place(self, directory: str) -> Path:
        relative = PurePosixPath(directory)
        if relative.is_absolute() or ".." in relative.parts:
            raise SiteError(f"rank 0 named {directory!r}, which is no directory of this site's home")
        return self.home / relative
