"""What is averaged in which phase of a round, where the second phase depends on the averages of the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class ProgramRun(Protocol):
    """One try at a program. All that it changes is its own."""

    def inputs(self, phase: int) -> list[torch.Tensor]:
        """What this member brings to a phase, in the shapes of the tensors that the phase averages."""

    def take(self, phase: int, averages: Sequence[torch.Tensor]) -> int | None:
        """The averages of a phase, read-only. Returns the phase that comes next; None: that was the last.

        The answer is the same for all members: it depends on averages, the seed, and what they all hold alike.
        """

    def results(self) -> list[torch.Tensor]:
        """What the averager's tensors become, in their order, after the last phase."""


class RoundProgram(Protocol):
    """How the tensors of an averager are averaged in several phases."""

    @property
    def description(self) -> str:
        """Equal for all who average with each other; at most 200 characters."""

    @property
    def nbytes(self) -> int:
        """Of the memory that a phase works through: much of it does not belong on the event loop."""

    @property
    def phases(self) -> Sequence[Sequence[int]]:
        """Which of the averager's tensors each phase averages, by index. None is empty; a round begins with phase 0."""

    def begin(self, seed: bytes) -> ProgramRun:
        """A try from the beginning. `seed` is equal for all members, and no other round has it."""


def run_alone(program: RoundProgram, seed: bytes) -> list[torch.Tensor]:
    """What a round with nobody else gives."""
    run, phase = program.begin(seed), 0
    while True:
        following = run.take(phase, run.inputs(phase))
        if following is None:
            return run.results()
        phase = following
