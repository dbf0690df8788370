"""Differences for a lossy codec: how far members' tensors are from the last average that all of them hold.

A codec's error is relative to its input. If it encodes values, changes smaller than its own steps are rounded away; if
it encodes differences, a change of any size is kept.

    x − reference ── codec ──▶ D ──▶ reference + D    the average, and the next reference
    x ──── without a codec ──▶ the average            and the next reference, where members have no common one

Members name their references when they look for a group, so the group's list tells which of the two its round is.
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
# No reference that others refer to has larger numbers, so float16 holds any difference to it from numbers of that size:
# whatever a liar has made of an average, the next one can be right again.
MOST = 32_752.0  # half of the largest number of float16


class ReferenceTold(msgspec.Struct, frozen=True, array_like=True):
    """What a member tells the others of its group: the round of its reference, empty if it has none, and the caller's
    own `gather`."""

    reference: Annotated[bytes, msgspec.Meta(max_length=GROUP_ID_BYTES)] = b""
    gathered: bytes = b""

    @classmethod
    def read(cls, data: bytes) -> ReferenceTold:
        """Decodes it; from data that makes no sense it takes no reference."""
        try:
            return wire.decode(ReferenceTold, data)
        except msgspec.DecodeError:
            return cls()


@dataclass(frozen=True, slots=True)
class Reference:
    """The last average that this member holds, in host memory that nobody writes any more. All members that hold the
    average of one round hold the same bits. `round_id`: b"" if no difference may be taken from it."""

    round_id: bytes = b""
    tensors: Sequence[torch.Tensor] = ()

    @classmethod
    def of(cls, round_id: bytes, averages: Sequence[torch.Tensor]) -> Reference:
        """The reference after a round that averaged the tensors as they are: a copy of its averages."""
        return cls._held(round_id, copies_of(averages))

    @classmethod
    def _held(cls, round_id: bytes, tensors: Sequence[torch.Tensor]) -> Reference:
        within = all(largest(each) <= MOST for each in tensors)
        return cls(round_id if within else b"", tensors)

    @torch.no_grad()
    def subtracted_from(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors' differences from the reference, in memory of their own."""
        return [tensor.detach().cpu() - kept for tensor, kept in zip(tensors, self.tensors, strict=True)]

    @torch.no_grad()
    def moved(self, round_id: bytes, averages: Sequence[torch.Tensor], memory: Sequence[torch.Tensor]) -> Reference:
        """The reference after a round that averaged differences, written to `memory`. All members have the same bits of
        both, and one addition per element is correctly rounded, so all get the same bits."""
        for kept, average, place in zip(self.tensors, averages, memory, strict=True):
            torch.add(kept, average, out=place)
        return Reference._held(round_id, memory)


def common_reference(group: Group) -> bytes:
    """The round of the reference that all members with tensors hold, by their word; b"": they have no common one.

    All members read the same, since the group's id covers it. A member that names another reference than it holds only
    makes the tensors travel without the codec, or its own differences wrong, and it could send wrong tensors anyway.
    """
    told = {ReferenceTold.read(member.gathered).reference for member in group.members if not member.auxiliary}
    return told.pop() if len(told) == 1 else b""
