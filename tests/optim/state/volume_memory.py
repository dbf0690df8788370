"""Counts what the averaging of states takes of memory."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from unittest import mock

import torch

from swarmcli import memory as lending
from swarmcli.optim.state import volumes


class VolumeMemory(ExitStack):
    """Inside the block: bytes for volumes and for the results of rounds, as long as anybody holds them. `now` and the
    `most` there were."""

    def __enter__(self) -> VolumeMemory:
        self.now = self.most = 0
        self._fresh = lending.fresh_memory
        for module in (lending, volumes):
            self.enter_context(mock.patch.object(module, "fresh_memory", self._counted))
        return self

    def _counted(self, nbytes: int) -> torch.Tensor:
        array = self._fresh(nbytes).numpy()
        self.now += nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(array, self._gone, nbytes).atexit = False
        return torch.from_numpy(array)

    def _gone(self, nbytes: int) -> None:
        self.now -= nbytes
