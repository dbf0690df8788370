"""A round computes this: the tensors that a member brings to each phase, and the results that follow from averages."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol, TypeAlias

import torch

# Yields this member's tensors for a phase, is sent their averages, read-only, and returns the new values of the
# averager's tensors, in their order.
Phases: TypeAlias = Generator[list[torch.Tensor], Sequence[torch.Tensor], list[torch.Tensor]]


class RoundProgram(Protocol):
    """How the tensors of an averager are averaged in several phases. All members go through all of them."""

    @property
    def description(self) -> str:
        """Equal for all members of a group; at most 200 characters."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that a phase works through: long work does not belong on the event loop."""

    @property
    def phases(self) -> Sequence[Sequence[int]]:
        """The averager's tensors that each phase averages, by index. None is empty."""

    def run(self, seed: bytes) -> Phases:
        """A try from the beginning, which changes nothing but its own memory. `seed` is equal for all members, and no
        other round has it. What follows from averages is the same for all members."""


class OnePhase:
    """The program of tensors that are averaged as they are."""

    description, nbytes = "one all-reduce", 0

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self.phases = (range(len(self._tensors)),)

    def run(self, seed: bytes) -> Phases:
        return list((yield self._tensors))


def advance(phases: Phases, averages: Sequence[torch.Tensor] | None) -> tuple[list[torch.Tensor], bool]:
    """Gives a program the averages of its last phase (None: it begins). Returns its next tensors, and whether these are
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
