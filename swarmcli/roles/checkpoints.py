"""Checkpoints beside a run that does not wait for the disk."""

from __future__ import annotations

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from swarmcli.errors import CheckpointError
from swarmcli.optim import Optimizer
from swarmcli.roles.collaboration import Collaboration
from swarmcli.roles.peer import RunPeer
from swarmcli.training import CheckpointStore
from swarmcli.training.checkpoint_store import Shards
from swarmcli.training.model_card import describe_model


def store_of(collaboration: Collaboration) -> CheckpointStore:
    """The checkpoints in a peer's home, each with what the task needs beside the model, and a model card."""
    peer, optimizer = collaboration.peer, collaboration.optimizer
    recipe, directory = peer.recipe, peer.home.path / "checkpoints"

    def describe(directory: Path, epoch: int, samples: int | None) -> None:
        roles = [optimizer.report().role, *(report.role for report in optimizer.peers().values())]
        describe_model(directory, recipe, collaboration.task, epoch, samples, trainers=roles.count("trainer"))

    keep = recipe.checkpoint.keep
    return CheckpointStore(directory, recipe.run_id, keep=keep, events=peer.events, describe=describe)


def write_result(collaboration: Collaboration, *, shards: Shards | None = None) -> Path | None:
    """The checkpoint of a run that has ended, into the home; None if it could not be written."""
    store, optimizer = store_of(collaboration), collaboration.optimizer
    state, epoch = optimizer.state_dict(), optimizer.local_epoch
    if shards is not None:
        shards.copy()
    return store.write(collaboration.model, state, epoch, shards=shards)


def require_result(written: Path | None, peer: RunPeer) -> None:
    """To be called once others need this peer no more. Raises CheckpointError if the result was not written."""
    if written is None:
        raise CheckpointError(
            f"the run has ended, but its result is not in {peer.home.path}: see the warning above. Other peers of the "
            "run have it as well, the monitor for one; or make room, and join again while somebody is there who hands "
            "it out"
        )


class BackgroundCheckpoints:
    """Writes a copy of the state every `every` epochs in a thread of its own, and once more at the end.

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
    ) -> None:
        """`shards`: for an optimizer whose statistics are spread over the processes of a site."""
        self._store = store
        self._model = model
        self._optimizer = optimizer
        self._every = every
        self._shards = shards
        self._seen = self._written = optimizer.local_epoch
        self._writer = ThreadPoolExecutor(1, "swarm-checkpoints")
        self._writing: Future[object] | None = None

    def look(self) -> None:
        """To be called between steps: begins to write if a multiple of `every` was passed since the last call.

        Raises what a write that ended meanwhile raised: SiteError, where a process of the site is gone.
        """
        epoch = self._optimizer.local_epoch
        due = self._every and epoch // self._every > self._seen // self._every
        self._seen = epoch
        if due and (self._writing is None or self._writing.done()):
            if self._writing is not None:
                self._writing.result()
            self._begin(epoch)

    def _begin(self, epoch: int) -> None:
        state = copy.deepcopy(self._take())
        model = copy.deepcopy(self._model)
        self._written = epoch
        self._writing = self._writer.submit(self._store.write, model, state, epoch, shards=self._shards)

    def _take(self) -> dict[str, Any]:
        """The state between two steps; the model has the updates for which this waits."""
        state = self._optimizer.state_dict()
        if self._shards is None:
            return state
        self._shards.copy()
        return {**state, "state": {}}

    def __enter__(self) -> BackgroundCheckpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.shutdown(wait=True)
        epoch = self._optimizer.local_epoch
        if kind is None and epoch != self._written:
            self._store.write(self._model, self._take(), epoch, shards=self._shards)
