"""One outcome per round: what a decision is, and what follows from it for one member.

The round's result is one value, because each part is averaged by one member; its digest is a hash over the hashes of
the parts. How the group decides is in `ballots.py`; everyone who knows the decision knows the same one:

    committed, and own digest equal     apply
    committed, otherwise                undecided: the group has a result that did not come here in time
    again                               try again, without those who were lost
    aborted                             failed: nobody applies anything
    nobody knows                        undecided: inputs are kept

So no two members apply different results, and none takes a round for failed that another one applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from swarmcli.averaging.round.messages import Digests, Hash, Indices, Words
from swarmcli.errors import RoundFailed, RoundUndecided


class Committed(msgspec.Struct, frozen=True, tag=True):
    digest: Hash


class Aborted(msgspec.Struct, frozen=True, tag=True):
    """The round is given up. `suspects`: who had better not be in the next one."""

    reason: Words
    suspects: Indices = ()


class Again(msgspec.Struct, frozen=True, tag=True):
    """The members begin again, as far as averages are missing.

    members    who goes on; the others are lost
    reducers   of them, who reduces what nobody holds
    held       digests of the averages that somebody holds, 32 bytes for each part; zeros for one that nobody holds
    """

    members: Indices
    reducers: Indices
    held: Digests


Decision: TypeAlias = Committed | Aborted | Again


def conclude(own: bytes | None, decision: Decision | None, members: Sequence[bytes] = ()) -> None:
    """Returns if a member that holds the result with digest `own` (None: not all of it) is to apply it.

    Raises RoundFailed if the group gave the round up, naming the suspects among `members`, and RoundUndecided if
    this member cannot follow the group.
    """
    match decision:
        case None:
            raise RoundUndecided("no quorum of the group is in reach, and nobody who knows the outcome")
        case Again():
            raise RoundUndecided("the group tries again more often than it should")
        case Aborted(reason, suspects):
            raise RoundFailed(reason, [members[suspect] for suspect in suspects if suspect < len(members)])
        case Committed(digest) if own is None:
            raise RoundUndecided(f"the group committed the result {digest.hex()[:8]}, which is not all here")
        case Committed(digest) if own != digest:
            raise RoundUndecided(f"the group committed another result than the one that is here ({digest.hex()[:8]})")
