"""What makes a lossy codec fit for states: members send how far they are from the last committed average.

    values      x ──────────────── no codec ──▶ the average ──▶ reference, named by its round
    differences x − reference ──── codec ─────▶ D ───────────▶ reference + D: the average, and the next reference

A codec's error is relative to what it is given. An epoch changes parameters by 1e-4 of their size, say, and float16
keeps 5e-4 of it: sent as values, what was learned would be rounded away. Differences lose 5e-4 of what was learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarmcli.averaging.control import encode_gathered
from swarmcli.averaging.group import Group


@dataclass(slots=True)
class Reference:
    """The last average of a volume. All peers that hold one of the same round hold the same bits."""

    round_id: bytes
    tensors: list[torch.Tensor]

    @classmethod
    @torch.no_grad()
    def of(cls, round_id: bytes, averages: Sequence[torch.Tensor]) -> Reference:
        return cls(round_id, [average.clone() for average in averages])

    @torch.no_grad()
    def subtract_from(self, values: Sequence[torch.Tensor]) -> None:
        """Values become differences, in place."""
        for value, reference in zip(values, self.tensors, strict=True):
            value.sub_(reference)

    @torch.no_grad()
    def move(self, round_id: bytes, differences: Sequence[torch.Tensor]) -> None:
        """Becomes the average of this round, whose averaged differences become that average, in place.

        One correctly rounded addition per element, of bits that all members have: they end with the same ones.
        """
        for difference, reference in zip(differences, self.tensors, strict=True):
            reference.add_(difference)
            difference.copy_(reference)
        self.round_id = round_id


def common_reference(group: Group) -> bytes:
    """What all members with a state told as the name of their reference, encoded; empty if they told several or none.

    It is part of the group's id, so everyone comes to the same answer.
    """
    told = {member.gathered for member in group.members if not member.auxiliary}
    return told.pop() if len(told) == 1 else b""


def encoded(reference: Reference | None) -> bytes:
    """As a member tells it."""
    return encode_gathered(None if reference is None else reference.round_id)
