"""Who reduces how much of the vector: shares of the work in proportion to what each member's link can carry.

With s members that send and receive, one that reduces a fraction v of the vector and also averages its own tensors
moves (1 - v) + (s - 1)·v = 1 + (s - 2)·v vectors each way; an auxiliary moves s·v. A round takes as long as its
slowest link, so the shares solve a linear program:

    minimize T   with   traffic_i(v_i) / bandwidth_i <= T,   sum of v = 1,   v >= 0

Members whom some sender cannot reach get nothing. Bandwidths count per direction and only relative to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from swarmcli.averaging.group import Member
from swarmcli.errors import NoReducerError

# Weight of the second aim, shares in proportion to bandwidth, which decides where the first leaves a choice: with two
# senders, for instance, every division moves the same bytes.
_TIE_BREAK = 1e-3


def reducing_shares(members: Sequence[Member], total_size: int, min_vector_size: int = 0) -> tuple[float, ...]:
    """Each member's share of the vector, in the order of `members`; they sum to 1.

    `total_size` and `min_vector_size` count elements: nobody gets fewer than `min_vector_size` of them, except that
    one member gets everything if even that is less. Raises NoReducerError when nobody can reduce for all.
    """
    able = [index for index in range(len(members)) if _can_reduce(members, index)]
    if not able:
        raise NoReducerError(_why_nobody(members))
    # The fastest first, and members of equal bandwidth in their order.
    most = len(able) if min_vector_size <= 0 else max(1, total_size // min_vector_size)
    chosen = sorted(able, key=lambda index: -members[index].bandwidth)[:most]
    shares = _solve(members, chosen)
    large = [index for index in chosen if shares[index] * total_size >= min_vector_size]
    if len(large) < len(chosen):
        shares = _solve(members, large or chosen[:1])
    return tuple(shares)


def slowest_link(members: Sequence[Member], shares: Sequence[float]) -> float:
    """What the linear program minimizes: the time of a round in units of (vector size) / (bandwidth)."""
    senders = _count_senders(members)
    return max(
        (_traffic(member, share, senders) / member.bandwidth)
        for member, share in zip(members, shares, strict=True)
        if member.bandwidth > 0
    )


def can_exchange(first: Member, second: Member) -> bool:
    """Whether one of the two can dial the other."""
    return first.listening or second.listening


def reducers_among(members: Sequence[Member], able: Sequence[int], senders: Sequence[int]) -> tuple[int, ...]:
    """Those of `able` whom all senders can reach; if possible only those who offered to reduce."""

    def reachable(reducer: int) -> bool:
        return all(reducer == sender or can_exchange(members[reducer], members[sender]) for sender in senders)

    within = list(filter(reachable, able))
    return tuple([index for index in within if members[index].bandwidth > 0] or within)


def _can_reduce(members: Sequence[Member], index: int) -> bool:
    reducer = members[index]
    others = (other for place, other in enumerate(members) if place != index and not other.auxiliary)
    return reducer.bandwidth > 0 and all(can_exchange(reducer, other) for other in others)


def _why_nobody(members: Sequence[Member]) -> str:
    silent = sum(not member.listening for member in members)
    unwilling = sum(member.bandwidth == 0 for member in members)
    return (
        f"none of {len(members)} members can reduce for all: {silent} of them cannot be dialed and {unwilling} offer "
        "no bandwidth; a reducer must listen, unless every other member that sends tensors does"
    )


def _solve(members: Sequence[Member], chosen: Sequence[int]) -> list[float]:
    """Shares for all members, zero except for the chosen."""
    kinds = tuple((members[index].bandwidth, members[index].auxiliary) for index in chosen)
    solved = _optimal_shares(kinds, _count_senders(members))
    shares = [0.0] * len(members)
    for index, share in zip(chosen, solved, strict=True):
        shares[index] = share
    return shares


@lru_cache(maxsize=64)
def _optimal_shares(reducers: tuple[tuple[float, bool], ...], senders: int) -> tuple[float, ...]:
    """The linear program's solution for reducers given as (bandwidth, auxiliary)."""
    if len(set(reducers)) == 1:  # by symmetry; the usual case, and it spares loading the solver
        return (1 / len(reducers),) * len(reducers)
    return _solve_program(reducers, senders)


def _solve_program(reducers: tuple[tuple[float, bool], ...], senders: int) -> tuple[float, ...]:
    import numpy as np
    from scipy.optimize import linprog  # takes a third of a second to load, so only when needed

    count = len(reducers)
    bandwidth = np.array([bandwidth for bandwidth, _ in reducers], dtype=np.float64)
    bandwidth /= bandwidth.max()
    fixed = np.array([0.0 if auxiliary else 1.0 for _, auxiliary in reducers])  # traffic without reducing anything
    slope = np.array([float(senders if auxiliary else senders - 2) for _, auxiliary in reducers])
    # Variables: the shares, T, and the largest share in proportion to its owner's bandwidth. Rows are scaled by the
    # smallest bandwidth, or a link a million times slower than another would upset the solver.
    scale = bandwidth.min()
    none, each = np.zeros((count, 1)), np.full((count, 1), -scale)
    solution = linprog(
        c=np.array([0.0] * count + [1.0, _TIE_BREAK]),
        A_ub=np.block([[np.diag(slope * scale / bandwidth), each, none], [np.diag(scale / bandwidth), none, each]]),
        b_ub=np.concatenate([-fixed * scale / bandwidth, np.zeros(count)]),
        A_eq=np.array([[1.0] * count + [0.0, 0.0]]),
        b_eq=np.array([1.0]),
    )
    shares = bandwidth if solution.x is None else np.clip(solution.x[:count], 0, None)
    return tuple(float(share) for share in shares / shares.sum())


def _count_senders(members: Sequence[Member]) -> int:
    return sum(not member.auxiliary for member in members)


def _traffic(member: Member, share: float, senders: int) -> float:
    return share * senders if member.auxiliary else 1 + (senders - 2) * share
