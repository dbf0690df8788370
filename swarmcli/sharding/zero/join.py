"""Uneven inputs: what a rank that has run out of batches does while the others still train."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from swarmcli.sharding.transfer import gather_numbers, receive_tensors, send_tensors


class UnevenInputs:
    """Whether this rank has run out of inputs, and whether such ranks are given the gradients of the others."""

    def __init__(self, *, hand_over: bool) -> None:
        self.joined = False
        self.hand_over = hand_over

    def exchange(self, shares: Sequence[Sequence[torch.Tensor]], group: dist.ProcessGroup) -> None:
        """Sets the gradients of this rank's share, if it has run out, to those of a rank that has not.

        A collective call before each step; `shares` are the parameters of each rank. The gradients of all that still
        have inputs are the same (DistributedDataParallel), but it leaves none with the others, whose share would be
        stepped with the last ones they had.
        """
        joined = [bool(flag) for (flag,) in gather_numbers([float(self.joined)], group)]
        if not any(joined) or all(joined):
            return
        rank, giver = dist.get_rank(group), joined.index(False)
        if rank == giver:
            for taker in (each for each, has_joined in enumerate(joined) if has_joined):
                gradients = [parameter.grad for parameter in shares[taker]]
                send_tensors([torch.tensor([gradient is not None for gradient in gradients])], taker, group)
                send_tensors([gradient.to_dense() for gradient in gradients if gradient is not None], taker, group)
        elif joined[rank]:
            _receive_gradients(shares[rank], giver, group)


class StepAlong(JoinHook):
    """Shadows every step of those that still have inputs, because they need this rank's share stepped and sent."""

    def __init__(self, step: Callable[[], object], inputs: UnevenInputs) -> None:
        super().__init__()
        self._step = step
        self._inputs = inputs

    def main_hook(self) -> None:
        self._inputs.joined = True
        self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._inputs.joined = self._inputs.hand_over = False


def _receive_gradients(parameters: Sequence[torch.Tensor], source: int, group: dist.ProcessGroup) -> None:
    present = torch.zeros(len(parameters), dtype=torch.bool)
    receive_tensors([present], source, group)
    gradients = [
        torch.empty_like(parameter, memory_format=torch.contiguous_format) if has_one else None
        for parameter, has_one in zip(parameters, present.tolist(), strict=True)
    ]
    receive_tensors([gradient for gradient in gradients if gradient is not None], source, group)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
