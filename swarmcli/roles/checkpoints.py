"""Checkpoints beside a run that does not wait for the disk."""

from __future__ import annotations

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

from torch import nn

from swarmcli.optim import Optimizer
from swarmcli.training import CheckpointStore
from swarmcli.training.checkpoint_store import Shards


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
