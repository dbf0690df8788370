"""What a member of a standing group tells the others of itself; the group's leader hands it on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import msgspec

from swarmcli.network import wire


class Told(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, frozen=True):
    """A stranger's words. Only what is not as usual travels."""

    epoch: int
    sketch: bytes = b""  # of its parameters; empty: it tells none
    several: bool = False  # it counts more peers than one group may hold
    apart: bool = False  # its state is another than that of others at the same standing, see TrainingState.apart


def read_told(gathered: Iterable[bytes]) -> Iterator[Told]:
    """What members told, in the order of the group; who told nothing, or nothing readable, is left out."""
    for data in gathered:
        try:
            yield wire.decode(Told, data)
        except msgspec.DecodeError:
            continue


def are_several(told: Collection[Told]) -> bool:
    """Whether several groups end this epoch, so that its lineage only counts epochs: by at least half of the members.

    A newcomer is the first to count itself, so of two it is the one that counts more who knows better.
    """
    return bool(told) and 2 * sum(each.several for each in told) >= len(told)


def are_apart(told: Collection[Told]) -> bool:
    """Whether the members hold unlike states: by more than half of them, so that no single one can make it so."""
    return 2 * sum(each.apart for each in told) > len(told)
