"""The saves of a sharded optimizer in one directory, numbered, of which the newest stay."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch.distributed as dist

from swarmcli.averaging.checks import as_count
from swarmcli.errors import CheckpointError
from swarmcli.network import wire
from swarmcli.sharding.files.exchange import exchange
from swarmcli.sharding.files.manifest import MANIFEST, Manifest, unseal
from swarmcli.sharding.files.moving import ShardedOptimizer, require_sharded
from swarmcli.sharding.files.save import complete, load_save, read_manifest, try_to_write

logger = logging.getLogger(__name__)

_NAME = re.compile(r"save-(\d{8,})")


@dataclass(frozen=True)
class Restored:
    """A save that was loaded."""

    epoch: int
    name: str  # of its directory


class _Begun(msgspec.Struct, frozen=True):
    """What one rank knows before a save."""

    newest: int  # number of a save here
    epoch: int
    problem: str = ""


class _Found(msgspec.Struct, frozen=True):
    """A save as one rank sees it."""

    number: int
    manifest: bytes  # sealed; empty: not there, or not to be used
    problem: str = ""


class ShardedStateStore:
    """Where all ranks of a sharded optimizer write their state, each its own share, and read it at a restart.

        <directory>/save-00000007/     see swarmcli.sharding.files.save

    Every rank makes one, with the same directory or, on machines that share none, with one of its own. No rank ever
    holds more than its share. All methods are collective calls over the optimizer's process group, of which one may run
    at a time; they raise RuntimeError when a rank is gone or the group's timeout has passed.
    """

    def __init__(self, directory: Path | str, *, keep: int = 2) -> None:
        """`keep`: how many saves stay on the disk; ValueError below 1, TypeError for no whole number or no path."""
        self._keep = as_count(keep, "keep", least=1)
        if not isinstance(directory, str | os.PathLike):
            raise TypeError(f"directory={directory!r}: expected a path")
        self.directory = Path(directory)

    def save(self, optimizer: ShardedOptimizer, *, epoch: int = 0) -> Path:
        """Writes what every rank has in `optimizer`, which may not change meanwhile; `epoch` comes back from `load`.

        The save counts when all ranks' files are flushed to their disks; a rank killed before leaves the earlier
        saves as they were. Raises CheckpointError at all ranks if one cannot write (a full disk) or gives another
        epoch; what was written of this save is removed, and older ones stay. A rank whose `epoch` is no whole number
        from 0 to 2**63 - 1 raises TypeError or ValueError, the others CheckpointError. TypeError for an optimizer
        whose state is not sharded.
        """
        require_sharded(optimizer, "optimizer")
        group = optimizer.process_group
        epoch, newest = self._begin(epoch, group)
        place = self.directory / f"save-{newest + 1:08d}"
        report = try_to_write(place, optimizer.rank, epoch, optimizer.local_state())
        try:
            complete(place, epoch, report, optimizer, group)
        except CheckpointError:
            shutil.rmtree(place, ignore_errors=True)
            raise
        self._remove_older_than(newest + 1)
        return place

    def load(self, optimizer: ShardedOptimizer) -> Restored | None:
        """Loads the newest save that is whole into `optimizer`, of as many ranks and shares as it may have now.

        Where files of the newest save are missing or damaged, the next older one is loaded, with a warning that says
        which. None, and nothing has changed, when no save was ever completed. Raises CheckpointError, with nothing
        changed, when none can be used; it names the files, what is wrong with each, and the fix. TypeError for an
        optimizer whose state is not sharded.
        """
        require_sharded(optimizer, "optimizer")
        group = optimizer.process_group
        told = exchange(wire.encode(list(self._look())), group)
        found = [each for data in told for each in wire.decode(list[_Found], data)]
        problems = [each.problem for each in found if each.problem]
        for number, sealed in sorted({(each.number, each.manifest) for each in found if each.manifest}, reverse=True):
            place = self.directory / f"save-{number:08d}"
            manifest = unseal(Manifest, sealed, place / MANIFEST)
            try:
                load_save([place], manifest, optimizer, group)
            except CheckpointError as error:
                problems.append(f"{place.name}: {error}")
                continue
            for problem in problems:
                logger.warning("the state of epoch %d was loaded instead of a newer one: %s", manifest.epoch, problem)
            return Restored(manifest.epoch, place.name)
        if problems:
            raise CheckpointError(f"no save in {self.directory} can be used: {'; '.join(dict.fromkeys(problems))}")
        return None

    def _begin(self, epoch: int, group: dist.ProcessGroup) -> tuple[int, int]:
        """The epoch, on which all ranks agree, and the newest save's number anywhere. A collective call."""
        try:
            own, wrong = _Begun(max(self._numbers(), default=0), _checked(epoch)), None
        except (TypeError, ValueError, CheckpointError) as error:
            own, wrong = _Begun(0, 0, str(error)), error
        told = [wire.decode(_Begun, data) for data in exchange(wire.encode(own), group)]
        if wrong is not None:
            raise wrong
        problems = [f"rank {rank}: {each.problem}" for rank, each in enumerate(told) if each.problem]
        problems += [
            f"rank {rank} gave epoch={each.epoch}, rank 0 {told[0].epoch}"
            for rank, each in enumerate(told)
            if each.epoch != told[0].epoch and not problems
        ]
        if problems:
            raise CheckpointError(f"nothing was saved: {'; '.join(problems[:10])}")
        return own.epoch, max(each.newest for each in told)

    def _numbers(self) -> list[int]:
        try:
            names = [path.name for path in self.directory.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot be read as a directory: {error.strerror}") from error
        return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))

    def _look(self) -> Iterator[_Found]:
        try:
            numbers = self._numbers()
        except CheckpointError as error:
            yield _Found(0, b"", str(error))
            return
        for number in numbers:
            place = self.directory / f"save-{number:08d}"
            try:
                if (place / MANIFEST).exists():  # else it was never completed
                    read_manifest(place)
                    yield _Found(number, (place / MANIFEST).read_bytes())
            except (CheckpointError, OSError) as error:
                yield _Found(number, b"", str(error))

    def _remove_older_than(self, newest: int) -> None:
        """Keeps the newest whole saves up to this one; ranks that are ahead may be writing the next one already."""
        older = [number for number in self._numbers() if number <= newest]
        whole = [number for number in older if (self.directory / f"save-{number:08d}" / MANIFEST).exists()]
        for number in set(older) - set(whole[-self._keep :]):
            shutil.rmtree(self.directory / f"save-{number:08d}", ignore_errors=True)


def _checked(epoch: object) -> int:
    checked = as_count(epoch, "epoch")
    if checked >= 2**63:
        raise ValueError(f"epoch={checked}: expected less than 2**63")
    return checked
