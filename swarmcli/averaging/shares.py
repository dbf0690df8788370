"""Shares of the reducing work: how much of the vector each member reduces, by what its link can carry.

With s members that send and receive, one that reduces a fraction v of the vector and also averages its own tensors
sends (1 - v) + (s - 1)·b·v vectors; an auxiliary sends s·b·v. Averages take b times the bytes of what a sender brings:
once, where both directions are alike; more, where they hold what several have sent. A round takes as long as its
slowest link, and uplinks are the slower ones, so the shares solve a linear program:

    minimize T   with   traffic_i(v_i) / bandwidth_i <= T,   sum of v = 1,   v >= 0

Members that some sender cannot reach get nothing. Bandwidths count per direction and only relative to each other.

Where two members come together only over a relay, each of their bytes passes the relay's link as well, in and out:
2·v vectors for each sender that goes to a reducer over it. A relay that is a member has its own link for that; any
other relay is taken for as slow as the slowest member, and all members that go over it share it. Members that can be
reached directly reduce, unless a round with the others as well would take less than half as long.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from swarmcli.averaging.group import Dialable, Member, meeting
from swarmcli.errors import NoReducerError

Vector = NDArray[np.float64]

_TRIFLE = 1e-6  # of a round's time, which is not worth any shares that are far from proportion
_SLOWEST = 1e-12  # of the fastest link: slower ones count as this, so that all figures stay within floating point
_ROUNDING = 1e-15  # figures nearer to zero are taken for zero; all figures are at most about one


def reducing_shares(
    members: Sequence[Member], total_size: int, min_vector_size: int = 0, back: float = 1.0
) -> tuple[float, ...]:
    """Each member's share of the vector, in the order of `members`; they sum to 1.

    `total_size` and `min_vector_size` count elements: nobody gets fewer than `min_vector_size` of them, except that
    one member gets everything if even that is less. `back`: bytes of averages for a byte that is brought. Raises
    NoReducerError when nobody can reduce for all.
    """
    able = [index for index in range(len(members)) if _can_reduce(members, index)]
    if not able:
        raise NoReducerError(_why_nobody(members))
    direct = [index for index in able if _can_reduce(members, index, Dialable.DIRECTLY)]
    shares = _divide(members, direct or able, total_size, min_vector_size, back)
    if len(direct) in (0, len(able)) or not _relays_may_pay(members, able, slowest_link(members, shares, back)):
        return shares
    mixed = _divide(members, able, total_size, min_vector_size, back)
    return mixed if 2 * slowest_link(members, mixed, back) < slowest_link(members, shares, back) else shares


def slowest_link(members: Sequence[Member], shares: Sequence[float], back: float = 1.0) -> float:
    """The time of a round, which the linear program minimizes, in units of (vector size) / (bandwidth)."""
    senders = _count_senders(members)
    own = [
        share * senders * back if member.auxiliary else 1 + ((senders - 1) * back - 1) * share
        for member, share in zip(members, shares, strict=True)
    ]
    outside, relayed = 0.0, _relayed(members, range(len(members)))
    for relay, rates in relayed.items():
        passed = sum(rate * shares[reducer] for reducer, rate in rates.items())
        if isinstance(relay, int):
            own[relay] += passed
        else:
            outside = max(outside, passed)
    slowest = min(member.bandwidth for member in members if member.bandwidth > 0)
    # If others go over a member that offers no bandwidth, it is taken for as slow as the slowest one.
    links = [
        (own[index], member.bandwidth or slowest)
        for index, member in enumerate(members)
        if member.bandwidth > 0 or index in relayed
    ]
    return max(outside / slowest, *(traffic / bandwidth for traffic, bandwidth in links))


def reducer_opens(reducer: Member, sender: Member) -> bool:
    """Which of the two opens their stream: the sender, unless it is easier to dial than the reducer."""
    return sender.dialable > reducer.dialable


def reducers_among(members: Sequence[Member], able: Sequence[int], senders: Sequence[int]) -> tuple[int, ...]:
    """The `able` members that all senders can reach; if possible only those that offered to reduce, and among these
    only those that are reached without a relay."""

    def reachable(reducer: int, way: Dialable) -> bool:
        others = (sender for sender in senders if sender != reducer)
        return all(meeting(members[reducer], members[sender]) >= way for sender in others)

    within = [index for index in able if reachable(index, Dialable.OVER_RELAY)]
    willing = [index for index in within if members[index].bandwidth > 0] or within
    return tuple([index for index in willing if reachable(index, Dialable.DIRECTLY)] or willing)


def _relays_may_pay(members: Sequence[Member], able: Sequence[int], direct: float) -> bool:
    """Whether a round that takes so long with direct reducers alone could be twice as fast; it spares the solver.

    If relayed reducers take a fraction f, the round takes at least (1 - f)·direct, and 2·k·f / capacity for the relays,
    through which each part goes for k senders: together more than direct/2 unless 2·k < direct·capacity.
    """
    relayed = _relayed(members, able)
    slowest = min(member.bandwidth for member in members if member.bandwidth > 0)
    capacity = sum((members[relay].bandwidth if isinstance(relay, int) else 0.0) or slowest for relay in relayed)
    vectors = min(sum(rates.get(index, 0.0) for rates in relayed.values()) or math.inf for index in able)
    return vectors < direct * capacity


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
    """Shares for all members, zero except for the chosen."""
    relayed = _relayed(members, chosen)
    shares = np.zeros(len(members))
    if relayed or len({(members[index].bandwidth, members[index].auxiliary) for index in chosen}) > 1:
        shares[list(chosen)] = _solve_program(members, chosen, relayed, back)
    else:  # by symmetry
        shares[list(chosen)] = 1 / len(chosen)
    return [float(share) for share in shares]


def _relayed(members: Sequence[Member], reducers: Sequence[int]) -> dict[int | str, dict[int, float]]:
    """The traffic over each relay: reducer → vectors each way for its whole share. A relay is a member's index, or the
    text of its id."""
    passed: dict[int | str, dict[int, float]] = {}
    if not any(member.dialable == Dialable.OVER_RELAY for member in members):
        return passed
    places = {member.peer_id.text: index for index, member in enumerate(members)}
    for reducer in reducers:
        for sender, member in enumerate(members):
            if sender == reducer or member.auxiliary or meeting(members[reducer], member) != Dialable.OVER_RELAY:
                continue
            dialed = member if reducer_opens(members[reducer], member) else members[reducer]
            relay = dialed.addresses[0].removeprefix("relay://").partition("/")[0]
            rates = passed.setdefault(places.get(relay, relay), defaultdict(float))
            rates[reducer] += 2.0  # the sender's part, and the average that comes back
    return passed


def _solve_program(
    members: Sequence[Member], chosen: Sequence[int], relayed: Mapping[int | str, Mapping[int, float]], back: float
) -> Vector:
    """The linear program's solution. A row is the link of a reducer, of another member that relays, or of a relay
    outside."""
    senders, column = _count_senders(members), {index: place for place, index in enumerate(chosen)}
    slowest = min(member.bandwidth for member in members if member.bandwidth > 0)
    rows: list[list[float]] = []
    fixed: list[float] = []
    bandwidth: list[float] = []
    for link in [*chosen, *(relay for relay in relayed if relay not in column)]:
        row = [relayed.get(link, {}).get(reducer, 0.0) for reducer in chosen]
        member = members[link] if isinstance(link, int) else None
        if member is not None and link in column:
            row[column[link]] += senders * back if member.auxiliary else (senders - 1) * back - 1
        rows.append(row)
        fixed.append(0.0 if member is None or member.auxiliary else 1.0)
        bandwidth.append((member.bandwidth if member is not None else 0.0) or slowest)
    own = np.array([members[index].bandwidth for index in chosen])
    return _minimize(np.array(rows), np.array(fixed), np.array(bandwidth), own)


def _minimize(traffic: Vector, fixed: Vector, links: Vector, bandwidth: Vector) -> Vector:
    """Shares of least T, where each link (rows) carries `traffic @ shares + fixed` vectors. Of those the shares that
    are nearest to bandwidths: with two senders, for instance, every division moves the same bytes.

    traffic     (links, reducers) vectors for a whole share of each reducer
    fixed       (links,) vectors that it carries in any case
    links       (links,) what they carry per unit of time
    bandwidth   (reducers,)
    """
    # If one member reduced all, each link would be busy for so long; shares sum to 1, so these times are only mixed.
    times = (traffic + fixed[:, None]) / np.maximum(links / links.max(), _SLOWEST)[:, None]
    times /= max(times.max(), _SLOWEST)
    bandwidth = np.maximum(bandwidth / bandwidth.max(), _SLOWEST)
    shares = _most(np.ones(len(bandwidth)), times, np.ones(len(links)))
    shares /= shares.sum()
    least = (times @ shares).max()
    # No share is larger here than its owner's bandwidth, and their sum is the largest with which no link takes longer.
    # One may take longer by a trifle, unlike for each: where many limits met in one point, the search might not end.
    trifles = _TRIFLE * least / (shares / bandwidth).max() * np.linspace(0.5, 1.0, len(links))
    uses = np.vstack([np.eye(len(bandwidth)), (times - least) * bandwidth])
    shares = bandwidth * _most(bandwidth, uses, np.concatenate([np.ones(len(bandwidth)), trifles]))
    return shares / shares.sum()


def _most(worth: Vector, uses: Vector, limits: Vector) -> Vector:
    """The x >= 0 of largest `worth @ x` with `uses @ x <= limits`, by the simplex method. If one element has no limit,
    that one alone.

    worth    (elements,)
    uses     (rows, elements)
    limits   (rows,) zero or more
    """
    rows, count = uses.shape
    table = np.block([[uses, limits[:, None]], [-worth, np.zeros(1)]])
    outside, inside = np.arange(count), np.arange(count, count + rows)
    for _ in range(10 * (rows + count)):  # it takes about as many as there are elements
        entering = table[-1, :-1].argmin()
        column = table[:, entering].copy()
        able = np.flatnonzero(column[:-1] > _ROUNDING)
        if column[-1] >= -_ROUNDING:
            break
        if not len(able):
            return (np.arange(count) == outside[entering]).astype(np.float64)
        leaving = able[(table[able, -1] / column[able]).argmin()]
        row = table[leaving] / column[leaving]
        table -= np.outer(column, row)
        table[leaving], table[:, entering] = row, -column / column[leaving]
        table[leaving, entering] = 1 / column[leaving]
        outside[entering], inside[leaving] = inside[leaving], outside[entering]
    found = np.zeros(rows + count)
    found[inside] = table[:-1, -1]
    return np.maximum(found[:count], 0.0)  # rounding may leave some below zero


def _count_senders(members: Sequence[Member]) -> int:
    return sum(not member.auxiliary for member in members)
