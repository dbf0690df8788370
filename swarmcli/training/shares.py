"""Reading a checkpoint into a site: rank 0 the model and the settings, every rank its share of the statistics.

The checkpoint may be of a site with any number of ranks or of a single process, and lie where all ranks see it or, if
it was written on several machines, in parts where the parts were written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from swarmcli.checkpoints.layout import MANIFEST, SHARDED_FORMAT, SHARDS, TRAINING, file_digest, read_manifest
from swarmcli.errors import CheckpointError
from swarmcli.files.flat import unflatten
from swarmcli.files.tensor_file import TensorFile
from swarmcli.sharding.files.reshard import reshard
from swarmcli.sharding.files.save import MANIFEST as SHARDS_MANIFEST
from swarmcli.sharding.files.save import load_save, seal, unseal
from swarmcli.sharding.transfer import agree
from swarmcli.sharding.zero import ZeroRedundancyOptimizer
from swarmcli.sites.links import named
from swarmcli.sites.site import Site
from swarmcli.training.checkpoint import Checkpoint, load_checkpoint, read_shards

logger = logging.getLogger(__name__)


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
