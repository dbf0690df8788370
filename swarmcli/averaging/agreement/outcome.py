"""One outcome per round: what a decision is, and what follows from it for one member.

The round's result is one value, because each part is averaged by one member; its digest is a hash over the hashes of
the parts. How the group decides is in `ballots.py`; everyone who knows the decision knows the same one:

    committed, and own digest equal     apply
    committed, otherwise                undecided: the group has a result that did not come here in time
    aborted                             failed: nobody applies anything
    nobody knows                        undecided: inputs are kept

So no two members apply different results, and none takes a round for failed that another one applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from swarmcli.errors import RoundFailed, RoundUndecided


@dataclass(frozen=True, slots=True)
class Committed:
    digest: bytes


@dataclass(frozen=True, slots=True)
class Aborted:
    reason: str
    suspects: tuple[int, ...] = ()


Decision: TypeAlias = Committed | Aborted


def conclude(own: bytes | None, decision: Decision | None, members: Sequence[bytes] = ()) -> None:
    """Returns if a member that holds the result with digest `own` (None: not all of it) is to apply it.

    Raises RoundFailed if the group gave the round up, naming the suspects among `members`, and RoundUndecided if
    this member cannot follow the group.
    """
    match decision:
        case None:
            raise RoundUndecided("no quorum of the group is in reach, and nobody who knows the outcome")
        case Aborted(reason, suspects):
            raise RoundFailed(reason, [members[suspect] for suspect in suspects if suspect < len(members)])
        case Committed(digest) if own is None:
            raise RoundUndecided(f"the group committed the result {digest.hex()[:8]}, which is not all here")
        case Committed(digest) if own != digest:
            raise RoundUndecided(f"the group committed another result than the one that is here ({digest.hex()[:8]})")
