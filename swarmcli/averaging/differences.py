"""Differences for a lossy codec: how far members' tensors are from the last average that all of them hold.

A codec's error is relative to its input. If that is values, the codec rounds away each change that is smaller than its
own steps, at all members, round after round. If it is differences, the codec keeps a change of any size.

    x ──────────────── codec ──▶ the average ────▶ reference, named by its round's id
    x − reference ──── codec ──▶ D ──────────────▶ reference + D: the average, and the next reference

Members tell their references when they look for a group, and so know what travels in it. A member adds the error of the
codec in a first round to its first difference.
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
_MOST_AWAY = 2.0  # times the largest number of a tensor: at that distance the difference loses one digit more


class Way(Enum):
    """How tensors travel in a round."""

    DIFFERENCES = "differences"  # from the common reference, with the codec
    FIRST = "first"  # values with the codec: no member has a reference
    VALUES = "values"  # the same: most members' tensors are far from the last average
    EXACT = "exact"  # values without the codec: members have unlike references, or some have none


class DifferenceTold(msgspec.Struct, frozen=True, array_like=True):
    """A member tells the others of its group: the round of its reference, empty if it has none; whether its tensors are
    so near to it that differences lose no more than values; and the data that its user gathers."""

    reference: Annotated[bytes, msgspec.Meta(max_length=GROUP_ID_BYTES)] = b""
    near: bool = True
    gathered: bytes = b""

    @classmethod
    def read(cls, data: bytes) -> DifferenceTold:
        """Data that makes no sense tells of no reference."""
        try:
            return wire.decode(DifferenceTold, data)
        except msgspec.DecodeError:
            return cls()


@dataclass(slots=True)
class Reference:
    """An average, in host memory. All members that hold one of the same round hold the same bits.

    own      the base of this member's differences, if not `tensors`: those less the error that it still owes
    readers  rounds under way that may average differences from it
    """

    round_id: bytes
    tensors: list[torch.Tensor]
    own: list[torch.Tensor] | None = None
    readers: int = 0

    def tell(self, values: Sequence[torch.Tensor], gathered: bytes) -> bytes:
        """This member's `DifferenceTold`, encoded."""
        near = all(_is_near(value, kept) for value, kept in zip(values, self.tensors, strict=True))
        return wire.encode(DifferenceTold(self.round_id, near, gathered))

    @torch.no_grad()
    def base(self, way: Way) -> list[torch.Tensor] | None:
        """The base that this member subtracts from its tensors before they travel; None: nothing."""
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
        element, of bits that all members have. So all members get the same bits."""
        for kept, difference in zip(self.tensors, differences, strict=True):
            kept.add_(difference)
        self.own = None

    @torch.no_grad()
    def owe(self, lost: list[torch.Tensor], alpha: float) -> None:
        """`lost`, which is used up: the error of the codec in the values of this member, which moved to the average by
        `alpha`."""
        for each, kept in zip(lost, self.tensors, strict=True):
            each.mul_(-alpha).add_(kept)
        self.own = lost


@contextmanager
def reading(reference: Reference | None) -> Iterator[Reference | None]:
    """Inside the block only this reader may change the reference."""
    if reference is not None:
        reference.readers += 1
    try:
        yield reference
    finally:
        if reference is not None:
            reference.readers -= 1


def way_of(group: Group) -> tuple[Way, bytes]:
    """How tensors travel in this group, and from which reference. All members read the same, since it is in the group's
    id.

    A single member that lies costs bytes; only a majority can have values rounded.
    """
    told = [DifferenceTold.read(member.gathered) for member in group.members if not member.auxiliary]
    names = {each.reference for each in told}
    if len(names) != 1 or names == {b""}:
        return Way.EXACT if len(names) > 1 else Way.FIRST, b""
    near = sum(each.near for each in told)
    return Way.DIFFERENCES if 2 * near > len(told) else Way.VALUES, names.pop()


@torch.no_grad()
def lost_in(tensors: Sequence[torch.Tensor], layout: Layout, parts: Sequence[Part]) -> list[torch.Tensor]:
    """The errors of the codecs when these tensors travel in these parts."""
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
