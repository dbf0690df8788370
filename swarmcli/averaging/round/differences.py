"""Differences for a lossy codec: how far members' tensors are from the last average that all of them hold.

A codec's error is relative to its input. Of values it rounds away each change that is smaller than its own steps; of
differences it keeps a change of any size.

    x − reference ── codec ──▶ D ──▶ reference + D    the average, and the next reference
    x ──── without a codec ──▶ the average            and the next reference, where members have no common one

Members tell their references when they look for a group, so its list says which of the two its round is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch

from swarmcli.averaging.aggregators.base import largest
from swarmcli.averaging.group import GROUP_ID_BYTES, Group
from swarmcli.network import wire
from swarmcli.state.snapshot import copies_of

ROOM_TO_TELL = 40  # bytes of what a member gathers, at most
# No reference has larger numbers: float16 holds the differences of all such, so whatever a liar has made of an average,
# the next one can be anything that members hold.
MOST = 2.0**15


class ReferenceTold(msgspec.Struct, frozen=True, array_like=True):
    """A member tells the others of its group the round of its reference, empty if it has none, beside what its user
    gathers."""

    reference: Annotated[bytes, msgspec.Meta(max_length=GROUP_ID_BYTES)] = b""
    gathered: bytes = b""

    @classmethod
    def read(cls, data: bytes) -> ReferenceTold:
        """Data that makes no sense tells of no reference."""
        try:
            return wire.decode(ReferenceTold, data)
        except msgspec.DecodeError:
            return cls()


@dataclass(frozen=True, slots=True)
class Reference:
    """The last average that this member holds, in host memory that nobody writes any more. All members that hold the
    one of a round hold the same bits. `round_id`: b"" if others cannot refer to it."""

    round_id: bytes = b""
    tensors: Sequence[torch.Tensor] = ()

    @classmethod
    def of(cls, round_id: bytes, averages: Sequence[torch.Tensor]) -> Reference:
        """A copy of what a round has averaged as it is."""
        return cls._held(round_id, copies_of(averages))

    @classmethod
    def _held(cls, round_id: bytes, tensors: Sequence[torch.Tensor]) -> Reference:
        within = all(largest(each) <= MOST for each in tensors)
        return cls(round_id if within else b"", tensors)

    @torch.no_grad()
    def subtracted_from(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The differences, in memory of their own."""
        return [tensor.detach().cpu() - kept for tensor, kept in zip(tensors, self.tensors, strict=True)]

    @torch.no_grad()
    def moved(self, round_id: bytes, averages: Sequence[torch.Tensor], memory: Sequence[torch.Tensor]) -> Reference:
        """The next one, in this memory, after a round that averaged differences: by one correctly rounded addition per
        element, of bits that all members have. So all get the same bits."""
        for kept, average, place in zip(self.tensors, averages, memory, strict=True):
            torch.add(kept, average, out=place)
        return Reference._held(round_id, memory)


def common_reference(group: Group) -> bytes:
    """The round of the reference that all members with tensors hold, by their word; b"": they have no common one.

    All read the same, since it is in the group's id. What a member says otherwise than it holds has values travel
    without the codec, or makes its own differences what any false tensors are.
    """
    told = {ReferenceTold.read(member.gathered).reference for member in group.members if not member.auxiliary}
    return told.pop() if len(told) == 1 else b""
