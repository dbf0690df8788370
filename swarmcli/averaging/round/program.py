"""What a round computes: the tensors that a member brings to each phase, and the results from the averages."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol, TypeAlias

import torch

# Yields this member's tensors for a phase, is sent their averages, which it must not change, and at last returns the
# new values of the averager's tensors, in their order.
Phases: TypeAlias = Generator[list[torch.Tensor], Sequence[torch.Tensor], list[torch.Tensor]]


class RoundProgram(Protocol):
    """How the tensors of an averager are averaged in several phases. All members go through all of them."""

    @property
    def description(self) -> str:
        """Equal for all members of a group; at most 200 characters."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that a phase reads or writes, which tell how long it takes: long work leaves the event
        loop."""

    @property
    def phases(self) -> Sequence[Sequence[int]]:
        """The averager's tensors that each phase averages, by index. No phase is empty."""

    def run(self, seed: bytes) -> Phases:
        """Begins a try; it changes nothing but its own memory. `seed` is equal for all members, and no other round has
        it. From equal averages all members compute equal results."""


class OnePhase:
    """The program that averages tensors as they are."""

    description, nbytes = "one all-reduce", 0

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self.phases = (range(len(self._tensors)),)

    def run(self, seed: bytes) -> Phases:
        return list((yield self._tensors))


def advance(phases: Phases, averages: Sequence[torch.Tensor] | None) -> tuple[list[torch.Tensor], bool]:
    """Gives a program the averages of its last phase (None: it begins). Returns its next tensors, and whether they are
    its results."""
    try:
        return (next(phases) if averages is None else phases.send(averages)), False
    except StopIteration as end:
        return end.value, True


def run_alone(program: RoundProgram, seed: bytes) -> list[torch.Tensor]:
    """The results of a round without other members."""
    phases = program.run(seed)
    tensors, over = advance(phases, None)
    while not over:
        tensors, over = advance(phases, tensors)
    return tensors
