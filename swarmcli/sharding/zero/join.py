"""Uneven inputs: what a rank that has run out of batches does while the others still train."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.algorithms.join import JoinHook


class StepAlong(JoinHook):
    """Shadows every step of those that still have inputs, because they need this rank's share stepped and sent.

    The gradients must be there before it: the hook of DistributedDataParallel, named first to `Join`, sees to that.
    """

    def __init__(self, step: Callable[[], object]) -> None:
        super().__init__()
        self._step = step

    def main_hook(self) -> None:
        self._step()
