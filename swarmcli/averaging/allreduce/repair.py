"""How a group comes to one result after it has lost reducers: who gives which averages, who reduces which again.

No network in here. Members say which averages they hold, by their digests. A part that someone holds is copied from
there; a part that nobody holds is reduced again, by a deputy, from the inputs of those who are left.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from swarmcli.averaging.agreement.ballot_messages import DIGEST_BYTES
from swarmcli.averaging.allreduce.holdings import NOTHING
from swarmcli.averaging.allreduce.layout import Plan
from swarmcli.averaging.allreduce.partition import can_exchange
from swarmcli.averaging.allreduce.results import digest_of_parts
from swarmcli.averaging.group import Member


@dataclass(frozen=True)
class RepairPlan:
    """What the members are told.

    members   who takes part
    digests   what everyone is to hold, 32 bytes for each part; zeros where a deputy reduces
    sources   for each part that someone lacks, who gives it or reduces it again
    """

    members: frozenset[int]
    digests: bytes
    sources: Mapping[int, int]

    @property
    def reduced_again(self) -> dict[int, int]:
        """Part → its deputy."""
        return {part: source for part, source in self.sources.items() if digest_at(self.digests, part) == NOTHING}


def digest_at(digests: bytes, part: int) -> bytes:
    return digests[part * DIGEST_BYTES : (part + 1) * DIGEST_BYTES]


def plan_repair(
    members: Sequence[Member],
    holdings: Mapping[int, bytes],
    parts: int,
    *,
    suspects: Collection[int] = (),
    doubted: Collection[int] = (),
    wanted: bytes | None = None,
) -> RepairPlan | None:
    """`holdings`: digests of the averages at everyone who takes part, as in Holdings. `suspects` neither give nor
    reduce anything, `doubted` only what nobody else can. `wanted`: the digest of the result that has to come out;
    None: any result will do.

    Returns None if it cannot be done.
    """
    takers = [index for index in holdings if not members[index].auxiliary]
    givers = {index: held for index, held in holdings.items() if index not in suspects}
    target = _target(givers, parts, wanted)
    deputies = _deputies(members, takers, [index for index in givers if index not in doubted] or list(givers))
    if target is None or (not deputies and NOTHING in _each(target, parts)):
        return None
    sources, load = {}, Counter[int]()
    for part, digest in enumerate(_each(target, parts)):
        if digest == NOTHING:
            able: Sequence[int] = deputies
        elif all(digest_at(holdings[taker], part) == digest for taker in takers):
            continue
        else:
            able = [index for index, held in givers.items() if digest_at(held, part) == digest]
        lacking = [taker for taker in takers if digest_at(holdings[taker], part) != digest]
        source = min(
            able,
            key=lambda index: (index in doubted, _out_of_reach(members, index, lacking), load[index], index),
        )
        sources[part] = source
        load[source] += 1
    return RepairPlan(frozenset(holdings), target, sources)


def plan_of_deputies(plan: Plan, ballot: int, reduced_again: Mapping[int, int]) -> Plan:
    """The plan of the exchange in which deputies reduce parts again; its fingerprint tells it from all others."""
    parts = [replace(plan.parts[index], reducer=deputy) for index, deputy in reduced_again.items()]
    parts.sort(key=lambda part: (part.reducer, part.index))
    terms = f"{ballot};{sorted(reduced_again.items())}"
    fingerprint = hashlib.sha256(b"swarm repair" + plan.fingerprint + terms.encode()).digest()
    return replace(plan, parts=tuple(parts), fingerprint=fingerprint)


def _target(givers: Mapping[int, bytes], parts: int, wanted: bytes | None) -> bytes | None:
    """For each part the digest that most hold (honest reducers give everyone the same), or zeros if nobody does."""
    if wanted is not None:
        for held in givers.values():
            if digest_of_parts(held) == wanted:
                return held
    target = bytearray()
    for part in range(parts):
        counts = Counter(digest for held in givers.values() if (digest := digest_at(held, part)) not in (b"", NOTHING))
        target += min(counts, key=lambda digest: (-counts[digest], digest), default=NOTHING)
    return bytes(target) if wanted is None or digest_of_parts(bytes(target)) == wanted else None


def _deputies(members: Sequence[Member], takers: Sequence[int], givers: Collection[int]) -> list[int]:
    """Those whom all that send and receive can reach; if possible those who offered to reduce."""
    able = [index for index in sorted(givers) if not _out_of_reach(members, index, takers)]
    return [index for index in able if members[index].bandwidth > 0] or able


def _out_of_reach(members: Sequence[Member], source: int, takers: Sequence[int]) -> int:
    return sum(taker != source and not can_exchange(members[source], members[taker]) for taker in takers)


def _each(digests: bytes, parts: int) -> list[bytes]:
    return [digest_at(digests, part) for part in range(parts)]
