"""A member's word about itself to the group that ends an epoch, where several groups may end one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import msgspec

from swarmcli.network import wire


class MemberNote(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, frozen=True):
    """A stranger's words, handed on by the group's leader. Only what is not as usual travels."""

    several: bool = False  # it counts more peers than one group may hold
    apart: bool = False  # its state is another than that of others at the same position, see TrainingState.apart


def read_told(gathered: Iterable[bytes]) -> Iterator[MemberNote]:
    """Decodes what members told, in the order of the group; leaves out those that told nothing readable."""
    for data in gathered:
        try:
            yield wire.decode(MemberNote, data)
        except msgspec.DecodeError:
            continue


def are_several(told: Collection[MemberNote]) -> bool:
    """Whether several groups end this epoch, so that its lineage only counts epochs: by at least half of the members.

    A newcomer is the first to count itself, so of two it is the one that counts more who knows better.
    """
    return bool(told) and 2 * sum(each.several for each in told) >= len(told)


def are_apart(told: Collection[MemberNote]) -> bool:
    """Whether the members hold unlike states: by more than half of them, so that no single one can make it so."""
    return 2 * sum(each.apart for each in told) > len(told)
