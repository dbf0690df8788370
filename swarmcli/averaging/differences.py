"""What a lossy codec is given: how far members' tensors are from the last average that all of them hold.

A codec's error is relative to what it is given. Of values it rounds away whatever changed them by less than its own
steps, at everybody, round after round; of differences it keeps a change of any size.

    x ──────────────── codec ──▶ the average ────▶ reference, named by its round's id
    x − reference ──── codec ──▶ D ──────────────▶ reference + D: the average, and the next reference

Members tell what they hold when they look for a group, and read of each other what travels in it. What the codec took
from a member's values in a first round goes into its first difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import msgspec
import torch

from swarmcli.averaging.aggregators.base import largest
from swarmcli.averaging.group import GROUP_ID_BYTES, Group
from swarmcli.averaging.round.buffers import Inputs, Results
from swarmcli.averaging.round.plan import Layout, Part
from swarmcli.memory import fresh_memory
from swarmcli.network import wire

ROOM_TO_TELL = 64  # bytes of what a member gathers, at most
_MOST_AWAY = 2.0  # times the largest number of a tensor: so far from the reference, its difference loses one digit more


class Way(Enum):
    """What travels in a round."""

    DIFFERENCES = "differences"  # from the common reference, with the codec
    FIRST = "first"  # values with the codec: nobody has a reference
    VALUES = "values"  # the same: most members have tensors that the last average says nothing of
    EXACT = "exact"  # values without the codec: members have unlike references, or some have none


class Told(msgspec.Struct, frozen=True, array_like=True):
    """What one member tells the others of its group: the round of its reference, empty if it has none; whether its
    tensors are so near to it that differences lose no more than values; and what its user gathers."""

    reference: Annotated[bytes, msgspec.Meta(max_length=GROUP_ID_BYTES)] = b""
    near: bool = True
    gathered: bytes = b""

    @classmethod
    def read(cls, data: bytes) -> Told:
        """What makes no sense tells of no reference."""
        try:
            return wire.decode(Told, data)
        except msgspec.DecodeError:
            return cls()


@dataclass(slots=True)
class Reference:
    """An average, in host memory. All members that hold one of the same round hold the same bits.

    own      from what this member takes differences, if not from `tensors`: less by what it still has to bring in
    readers  rounds under way that may average differences from it
    """

    round_id: bytes
    tensors: list[torch.Tensor]
    own: list[torch.Tensor] | None = None
    readers: int = 0

    def tell(self, values: Sequence[torch.Tensor], gathered: bytes) -> bytes:
        """What this member tells the others."""
        near = all(_is_near(value, kept) for value, kept in zip(values, self.tensors, strict=True))
        return wire.encode(Told(self.round_id, near, gathered))

    @torch.no_grad()
    def base(self, way: Way) -> list[torch.Tensor] | None:
        """What this member takes from its tensors before they travel; None: nothing."""
        if way is Way.DIFFERENCES:
            return self.own or self.tensors
        if way is Way.EXACT and self.own is not None:
            return [own - kept for own, kept in zip(self.own, self.tensors, strict=True)]
        return None

    @torch.no_grad()
    def take(self, averages: Sequence[torch.Tensor]) -> None:
        """Becomes these averages."""
        for kept, average in zip(self.tensors, averages, strict=True):
            kept.copy_(average)
        self.own = None

    @torch.no_grad()
    def add(self, differences: Sequence[torch.Tensor]) -> None:
        """Becomes the average of a round, whose averaged differences these are: by one correctly rounded addition per
        element, of bits that all members have. So they end with the same ones."""
        for kept, difference in zip(self.tensors, differences, strict=True):
            kept.add_(difference)
        self.own = None

    @torch.no_grad()
    def owe(self, lost: list[torch.Tensor], alpha: float) -> None:
        """`lost`, which is used up: what the codec took from values of this member that moved to the average by
        `alpha`."""
        for each, kept in zip(lost, self.tensors, strict=True):
            each.mul_(-alpha).add_(kept)
        self.own = lost


@contextmanager
def reading(reference: Reference | None) -> Iterator[Reference | None]:
    """Inside, nobody but the reader changes it."""
    if reference is not None:
        reference.readers += 1
    try:
        yield reference
    finally:
        if reference is not None:
            reference.readers -= 1


def way_of(group: Group) -> tuple[Way, bytes]:
    """What travels in this group, and from which reference. Everybody reads the same, since it is in the group's id.

    A member that lies costs bytes; that values are rounded takes most members.
    """
    told = [Told.read(member.gathered) for member in group.members if not member.auxiliary]
    names = {each.reference for each in told}
    if len(names) != 1 or names == {b""}:
        return Way.EXACT if len(names) > 1 else Way.FIRST, b""
    near = sum(each.near for each in told)
    return Way.DIFFERENCES if 2 * near > len(told) else Way.VALUES, names.pop()


@torch.no_grad()
def lost_in(tensors: Sequence[torch.Tensor], layout: Layout, parts: Sequence[Part]) -> list[torch.Tensor]:
    """What the codecs take from these tensors when they travel in these parts."""
    inputs, lost = Inputs(tensors), Results(layout, fresh_memory(layout.nbytes))
    for part in parts:
        values = inputs.part(part)
        lost.part(part).copy_(values - part.codec.extract(part.codec.compress(values)))
    return lost.tensors()


@torch.no_grad()
def _is_near(value: torch.Tensor, reference: torch.Tensor) -> bool:
    value = value.cpu()
    most = _MOST_AWAY * largest(value)
    return all(largest(piece) <= most for piece in Inputs([value], base=[reference]).each())
