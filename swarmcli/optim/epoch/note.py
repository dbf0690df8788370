"""What a member tells the group that ends an epoch about itself, where several groups may end one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import msgspec

from swarmcli.network import wire


class MemberNote(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, frozen=True):
    """A member's words, which the group's leader hands on. Fields with their defaults do not travel."""

    several: bool = False  # it counts more peers than one group may hold
    apart: bool = False  # its state differs from others' at the same position, see TrainingState.apart


def read_told(gathered: Iterable[bytes]) -> Iterator[MemberNote]:
    """Decodes the members' notes, in the order of the group; leaves out members with nothing readable."""
    for data in gathered:
        try:
            yield wire.decode(MemberNote, data)
        except msgspec.DecodeError:
            continue


def are_several(told: Collection[MemberNote]) -> bool:
    """Whether several groups end this epoch, so that its lineage only counts epochs: if at least half of the members
    say so. Half suffices, since a newcomer is the first to count itself: of two members the one that counts more is
    right.
    """
    return bool(told) and 2 * sum(each.several for each in told) >= len(told)


def are_apart(told: Collection[MemberNote]) -> bool:
    """Whether the members hold unlike states: if more than half of them say so, since a single one may lie."""
    return 2 * sum(each.apart for each in told) > len(told)
