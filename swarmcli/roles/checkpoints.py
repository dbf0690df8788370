"""Checkpoints of one peer: beside a run that does not wait for the disk, and when the peer leaves."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn

from swarmcli.errors import CheckpointError, DataError
from swarmcli.events import Events, Noticed
from swarmcli.optim import Optimizer
from swarmcli.roles.collaboration import Collaboration
from swarmcli.training import STREAM, CheckpointStore
from swarmcli.training.checkpoint_store import Shards
from swarmcli.training.device import on_host
from swarmcli.training.model_card import describe_model


def store_of(collaboration: Collaboration) -> CheckpointStore:
    """The checkpoints in a peer's home, each with what the task needs beside the model, a model card, and
    where the peer's own stream of data was."""
    peer, optimizer = collaboration.peer, collaboration.optimizer
    recipe, directory = peer.recipe, peer.home.path / "checkpoints"

    def describe(directory: Path, epoch: int, samples: int | None) -> None:
        roles = [optimizer.report().role, *(report.role for report in optimizer.peers().values())]
        if (peer.home.path / STREAM).exists():
            shutil.copyfile(peer.home.path / STREAM, directory / STREAM)
        describe_model(directory, recipe, collaboration.task, epoch, samples, trainers=roles.count("trainer"))

    keep = recipe.checkpoint.keep
    return CheckpointStore(directory, recipe.run_id, keep=keep, events=peer.events, describe=describe)


class BackgroundCheckpoints:
    """Writes a copy of the state every `every` epochs in a thread of its own, and what is not written yet at the end.

    While one checkpoint is being written the next is left out: a slow disk costs checkpoints, not rounds.
    """

    def __init__(
        self,
        store: CheckpointStore,
        model: nn.Module,
        optimizer: Optimizer,
        every: int,
        *,
        shards: Shards | None = None,
        offers: bool = False,
        yields: bool = False,
        path: Path | None = None,
        events: Events | None = None,
    ) -> None:
        """To be made before the run is joined: what the optimizer holds now need not be written, since it is nothing or
        lies at `path`.

        `shards`: for an optimizer whose statistics are spread over the processes of a site. `offers`: others may rely
        on this peer's regular checkpoints. `yields`: this peer writes none where it can rely on another one, and at the
        end none if another one stays and holds as much.
        """
        self._store = store
        self._model = model
        self._optimizer = optimizer
        self._every = every
        self._shards = shards
        self._offers = offers and every > 0
        self._yields = yields
        self._events = events or Events()
        self._seen = optimizer.local_epoch
        self._written = self._lineage  # of the last state that need not be written any more
        self._writer = ThreadPoolExecutor(1, "swarm-checkpoints")
        self._work: Future[bool] | None = None  # its result: whether this peer is to write a checkpoint now
        self.failed = False  # the last state could not be written
        self.path = path
        self.outcome = ""  # what became of the last state, for people; empty where there was nothing new

    @classmethod
    def of_run(cls, collaboration: Collaboration, *, yields: bool) -> BackgroundCheckpoints:
        """Those of a peer that does its part of `checkpoint.every_epochs`, in its home."""
        peer = collaboration.peer
        return cls(
            store_of(collaboration),
            collaboration.model,
            collaboration.optimizer,
            peer.recipe.checkpoint.every_epochs,
            offers=True,
            yields=yields,
            path=collaboration.resumed,
            events=peer.events,
        )

    @property
    def _lineage(self) -> str:
        return self._optimizer.report().lineage

    def look(self) -> None:
        """To be called between steps: begins to write if a multiple of `every` was passed since the last call.

        A peer that yields first finds out, beside its steps, whether another one writes; if it has to write itself it
        begins a step or two later. Raises what a write that ended meanwhile raised: SiteError, where a process of the
        site is gone.
        """
        epoch = self._optimizer.local_epoch
        due = self._every > 0 and epoch // self._every > self._seen // self._every
        self._seen = epoch
        if self._work is not None and not self._work.done():
            return
        ended, self._work = self._work, None
        if (ended is not None and ended.result()) or (due and not self._yields):
            self._begin()
        elif due:
            self._work = self._writer.submit(lambda: not self._optimizer.checkpoints_elsewhere())

    def _begin(self) -> None:
        state, model = on_host(self._take()), on_host(self._model)
        self._work = self._writer.submit(self._write, model, state, self._optimizer.local_epoch, self._lineage)

    def _take(self) -> dict[str, Any]:
        """The state between two steps; the model has the updates for which this waits."""
        state = self._optimizer.state_dict()
        if self._shards is None:
            return state
        self._shards.copy()
        return {**state, "state": {}}

    def _write(self, model: nn.Module, state: Mapping[str, Any], epoch: int, lineage: str) -> bool:
        path = self._store.write(model, state, epoch, shards=self._shards)
        self.failed = path is None
        if path is not None:
            self.path, self._written = path, lineage
        if self._offers:  # from one that cannot write the next one takes over
            self._optimizer.offer_checkpoints(path is not None)
        return False

    def __enter__(self) -> Self:
        if self._offers:
            self._optimizer.offer_checkpoints(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.shutdown(wait=True)
        # Data that cannot be read on says nothing against the state. Of a site other processes may be gone then.
        if kind is None or (issubclass(kind, DataError) and self._yields):
            self._keep_last()

    def _keep_last(self) -> None:
        """Writes the state unless it is written, or another peer keeps it. `outcome` says what was done."""
        self.failed = False
        optimizer = self._optimizer
        if optimizer.is_averaging or self._lineage != self._written:
            state = self._take()  # an epoch that was about to end has ended now
            heir = optimizer.leave_state() if self._yields else None
            if heir is not None:
                report = optimizer.peers().get(heir[0])
                name = (report and report.name) or heir[0].short
                self.outcome = f"not saved: peer {name} holds epoch {heir[1]}"
                self._events.emit(Noticed("info", self.outcome))
                return
            self._write(self._model, state, optimizer.local_epoch, self._lineage)
        if self.failed:
            self.outcome = f"epoch {optimizer.local_epoch} could not be saved in {self._store.directory}"
        elif self.path is not None:
            self.outcome = f"saved epoch {optimizer.local_epoch} at {self.path}"

    def require(self) -> None:
        """To be called when the others need this peer no more. Tries once more to write what could not be written, and
        raises CheckpointError if that fails too."""
        if self.failed:
            self._keep_last()
        if self.failed:
            raise not_saved(self._store.directory)


def not_saved(place: Path) -> CheckpointError:
    """What a peer ends with whose last state could not be written to `place`."""
    return CheckpointError(
        f"what this peer has learned is not in {place}: see the warning above; the checkpoints there are as they were. "
        "Other peers of the run may have it as well: make room, and join again while one of them is there"
    )
