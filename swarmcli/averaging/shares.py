"""Shares of the reducing work: how much of the vector each member reduces, by what its line can carry.

With s members that send and receive, one that reduces a fraction v of the vector and also averages its own tensors
sends (1 - v) + (s - 1)·b·v vectors; an auxiliary sends s·b·v. An average takes b times the bytes of what one sender
brings: 1 if both directions are encoded alike, more if an average holds what several have sent. A round takes as long
as its slowest line, and lines send more slowly than they receive. So the shares are those of the least time T in which
the lines carry the whole vector:

    minimize T   with   traffic_i(v_i) / bandwidth_i <= T,   sum of v = 1,   v >= 0

Members that some sender cannot reach get nothing. Bandwidths count per direction and only relative to each other.

Members behind relays reduce only if nobody else can, or if a round would otherwise take four times as long: each byte
passes the relay in and out, and others use it too. If their relay is itself a member that all can dial, it does less by
reducing everything itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from swarmcli.averaging.group import Dialable, Member, meeting
from swarmcli.errors import NoReducerError

Vector = NDArray[np.float64]

_SLOWEST = 1e-12  # of the fastest line: slower ones count as this, so that all figures stay within floating point
_ACCURACY = 1e-9  # relative, of a search by halving: nobody knows bandwidths that well


def reducing_shares(
    members: Sequence[Member], total_size: int, min_vector_size: int = 0, back: float = 1.0
) -> tuple[float, ...]:
    """Returns each member's share of the vector, in the order of `members`; they sum to 1.

    `total_size` and `min_vector_size` count elements: nobody gets fewer than `min_vector_size` of them, except that
    one member gets everything if even that is less. `back`: bytes of an average for each byte that a sender brings.
    Raises NoReducerError if nobody can reduce for all.
    """
    able = [index for index in range(len(members)) if _can_reduce(members, index)]
    if not able:
        raise NoReducerError(_why_nobody(members))
    direct = [index for index in able if _can_reduce(members, index, Dialable.DIRECTLY)]
    shares = _divide(members, direct or able, total_size, min_vector_size, back)
    relays = {address.removeprefix("relay://").partition("/")[0] for each in members for address in each.addresses[:1]}
    if len(direct) in (0, len(able)) or any(members[index].peer_id.text in relays for index in direct):
        return shares
    mixed = _divide(members, able, total_size, min_vector_size, back)
    return mixed if 4 * slowest_line(members, mixed, back) < slowest_line(members, shares, back) else shares


def slowest_line(members: Sequence[Member], shares: Sequence[float], back: float = 1.0) -> float:
    """The time that a round takes on the slowest line, in units of (vector size) / (bandwidth)."""
    senders = _count_senders(members)
    return max(
        (share * senders * back if member.auxiliary else 1 + ((senders - 1) * back - 1) * share) / member.bandwidth
        for member, share in zip(members, shares, strict=True)
        if member.bandwidth > 0
    )


def reducer_opens(reducer: Member, sender: Member) -> bool:
    """Whether the reducer opens their stream; otherwise the sender does. Whoever is harder to dial opens it."""
    return sender.dialable > reducer.dialable


def _can_reduce(members: Sequence[Member], index: int, way: Dialable = Dialable.OVER_RELAY) -> bool:
    reducer = members[index]
    others = (other for place, other in enumerate(members) if place != index and not other.auxiliary)
    return reducer.bandwidth > 0 and all(meeting(reducer, other) >= way for other in others)


def _why_nobody(members: Sequence[Member]) -> str:
    silent = sum(not member.dialable for member in members)
    unwilling = sum(member.bandwidth == 0 for member in members)
    return (
        f"none of {len(members)} members can reduce for all: {silent} of them cannot be dialed and {unwilling} offer "
        "no bandwidth; a reducer must listen or have a relay, unless every other member that sends tensors does"
    )


def _divide(
    members: Sequence[Member], able: Sequence[int], total_size: int, min_vector_size: int, back: float
) -> tuple[float, ...]:
    """Shares among those of the `able` that get at least `min_vector_size` elements."""
    # The fastest first, and members of equal bandwidth in their order.
    most = len(able) if min_vector_size <= 0 else max(1, total_size // min_vector_size)
    chosen = sorted(able, key=lambda index: -members[index].bandwidth)[:most]
    shares = _solve(members, chosen, back)
    large = [index for index in chosen if shares[index] * total_size >= min_vector_size]
    if len(large) < len(chosen):
        shares = _solve(members, large or chosen[:1], back)
    return tuple(shares)


def _solve(members: Sequence[Member], chosen: Sequence[int], back: float) -> list[float]:
    """Shares for all members, zero except for the chosen. Of the divisions with the least T it takes the one nearest to
    the proportions of the bandwidths: with two senders, for instance, every division moves the same bytes."""
    senders = _count_senders(members)
    helps = np.array([members[index].auxiliary for index in chosen])
    fixed = np.where(helps, 0.0, 1.0)  # (chosen,) vectors that each sends without a share …
    more = np.where(helps, senders * back, (senders - 1) * back - 1)  # (chosen,) … and that a share of 1 adds
    bandwidth = np.array([members[index].bandwidth for index in chosen])
    bandwidth = np.maximum(bandwidth / bandwidth.max(), _SLOWEST)

    def most(time: float) -> Vector:
        """(chosen,) the largest share that each line carries in this time."""
        room = np.maximum(time * bandwidth - fixed, 0.0)
        return np.minimum(np.divide(room, more, out=np.ones(len(more)), where=more > 0), 1.0)

    least, enough = ((fixed + bound(more, 0.0)) / bandwidth for bound in (np.minimum, np.maximum))
    limits = most(_smallest(lambda time: most(time).sum(), least.max(), enough.max()))
    level = _smallest(lambda level: np.minimum(level * bandwidth, limits).sum(), 0.0, (1 / bandwidth).max())
    found = np.minimum(level * bandwidth, limits)
    shares = np.zeros(len(members))
    shares[list(chosen)] = found / found.sum()
    return [float(share) for share in shares]


def _smallest(filled: Callable[[float], float], low: float, high: float) -> float:
    """The smallest number from `low` to `high` for which `filled`, which never falls, comes to one."""
    if filled(low) >= 1:
        return low
    while high - low > _ACCURACY * high:
        middle = (low + high) / 2
        low, high = (low, middle) if filled(middle) >= 1 else (middle, high)
    return high


def _count_senders(members: Sequence[Member]) -> int:
    return sum(not member.auxiliary for member in members)
