"""Shares of the reducing work: as good as the best division found by trying, and only where everyone can reach."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from swarmcli.averaging.group import Dialable, Member, meeting
from swarmcli.averaging.shares import reducing_shares, slowest_link
from swarmcli.errors import NoReducerError
from swarmcli.network.identity import PeerID


def members_of(*kinds: tuple[float, bool, bool]) -> list[Member]:
    """Members from (bandwidth, listening, auxiliary)."""
    return [
        Member(PeerID(bytes([index]) * 32), bandwidth=bandwidth, listening=listening, auxiliary=auxiliary)
        for index, (bandwidth, listening, auxiliary) in enumerate(kinds)
    ]


kinds = st.tuples(st.sampled_from([0.0, 1.0, 2.0, 5.0, 10.0, 0.1]), st.booleans(), st.booleans())


def divisions(count: int, steps: int) -> Iterator[tuple[float, ...]]:
    """All ways to give out `steps` equal pieces among `count` members."""
    for bars in itertools.combinations(range(steps + count - 1), count - 1):
        edges = (-1, *bars, steps + count - 1)
        yield tuple((right - left - 1) / steps for left, right in itertools.pairwise(edges))


def can_reduce(members: Sequence[Member], index: int, way: Dialable = Dialable.OVER_RELAY) -> bool:
    me = members[index]
    others = (other for other in members if other is not me and not other.auxiliary)
    return me.bandwidth > 0 and all(meeting(me, other) >= way for other in others)


@settings(max_examples=25)
@given(st.lists(kinds, min_size=1, max_size=4), st.sampled_from([1.0, 3.2]))
def test_no_division_on_a_grid_is_better(group: list[tuple[float, bool, bool]], back: float) -> None:
    members = members_of(*group)
    able = [index for index in range(len(members)) if can_reduce(members, index)]
    assume(able and not all(member.auxiliary for member in members))
    shares = reducing_shares(members, 1000, back=back)
    assert sum(shares) == pytest.approx(1) and all(share >= 0 for share in shares)
    assert all(share == 0 for index, share in enumerate(shares) if index not in able)
    best = min(
        slowest_link(members, division, back)
        for division in divisions(len(members), 24)
        if all(share == 0 or index in able for index, share in enumerate(division))
    )
    assert slowest_link(members, shares, back) <= best * 1.002


def test_a_helper_reduces_what_its_line_carries_where_averages_are_larger_than_what_came() -> None:
    """Four trainers and a helper five times as quick: of dense sums it reduces everything, of sparse ones two thirds,
    since it sends 3.2 times as much for each of them. All of it would take half as long again."""
    members = members_of(*[(1.0, True, False)] * 4, (5.0, True, True))
    assert reducing_shares(members, 1000)[4] == pytest.approx(1, abs=1e-5)
    shares = reducing_shares(members, 1000, back=3.2)
    assert shares[4] == pytest.approx(0.668, abs=1e-3) and shares[:4] == pytest.approx([shares[0]] * 4)
    assert slowest_link(members, (0, 0, 0, 0, 1), 3.2) == pytest.approx(
        1.495 * slowest_link(members, shares, 3.2), rel=1e-3
    )


@settings(max_examples=25)
@given(st.lists(kinds, min_size=1, max_size=12))
def test_whoever_reduces_can_be_reached_by_every_sender(group: list[tuple[float, bool, bool]]) -> None:
    members = members_of(*group)
    if not any(can_reduce(members, index) for index in range(len(members))):
        with pytest.raises(NoReducerError, match="cannot be dialed"):
            reducing_shares(members, 1000)
        return
    for index, share in enumerate(reducing_shares(members, 1000)):
        assert share == 0 or can_reduce(members, index)


def test_equal_members_share_equally() -> None:
    assert reducing_shares(members_of(*[(3.0, True, False)] * 4), 1000) == (0.25,) * 4


def test_two_senders_share_in_proportion_although_any_division_takes_as_long() -> None:
    assert reducing_shares(members_of((3, True, False), (1, True, False)), 1000) == pytest.approx((0.75, 0.25))


def test_a_slow_member_reduces_nothing() -> None:
    shares = reducing_shares(members_of((10.0, True, False), (10.0, True, False), (0.1, True, False)), 1000)
    assert shares == pytest.approx((0.5, 0.5, 0.0), abs=1e-6)


def test_an_auxiliary_behind_a_firewall_reduces_when_all_senders_listen() -> None:
    assert reducing_shares(members_of((0.0, True, False), (0.0, True, False), (1.0, False, True)), 99) == (0, 0, 1)
    with pytest.raises(NoReducerError, match="1 of them cannot"):
        reducing_shares(members_of((0.0, True, False), (0.0, True, False), (0.0, False, True)), 99)
    with pytest.raises(NoReducerError, match="3 of them cannot"):
        reducing_shares(members_of((1.0, False, False), (1.0, False, False), (1.0, False, True)), 99)


def test_short_vectors_are_not_scattered() -> None:
    members = members_of((1.0, True, False), (4.0, True, False), (2.0, True, False), (1.0, True, False))
    assert reducing_shares(members, 100, min_vector_size=1000) == (0, 1, 0, 0)
    assert reducing_shares(members, 100, min_vector_size=40) == (0, 1, 0, 0)
    shares = reducing_shares(members, 100, min_vector_size=15)
    assert shares == pytest.approx((0, 5 / 6, 1 / 6, 0), abs=1e-3)


def least_time(senders: Sequence[float], auxiliaries: Sequence[float]) -> float:
    """Of a round of three senders or more with these bandwidths: found by halving."""
    low, high, slope = 0.0, 1e13, len(senders) - 2
    for _ in range(200):
        middle = (low + high) / 2
        most = [(middle * bandwidth - 1) / slope for bandwidth in senders]
        most += [middle * bandwidth / len(senders) for bandwidth in auxiliaries]
        low, high = (low, middle) if min(most) >= 0 and sum(most) >= 1 else (middle, high)
    return high


@given(st.lists(st.floats(1e-6, 1e6), min_size=3, max_size=8), st.lists(st.floats(1e-6, 1e6), max_size=4))
@example([1e6] * 3, [1e-6])
def test_bandwidths_of_all_magnitudes_are_solved(senders: list[float], auxiliaries: list[float]) -> None:
    members = members_of(*[(each, True, False) for each in senders], *[(each, True, True) for each in auxiliaries])
    shares = reducing_shares(members, 1000)
    assert sum(shares) == pytest.approx(1) and min(shares) >= 0
    assert slowest_link(members, shares) == pytest.approx(least_time(senders, auxiliaries), rel=1e-5)


RELAYS = ["aa", "bb", PeerID(bytes([0]) * 32).text]  # two outside, and the first member
relayed_kinds = st.tuples(st.sampled_from([0.0, 1.0, 5.0, 0.05]), st.sampled_from(["", "tcp", *RELAYS]), st.booleans())


@settings(max_examples=25)
@given(st.lists(relayed_kinds, min_size=2, max_size=4))
@example([(0.0, "tcp", False), (1.0, "", False), (5.0, RELAYS[2], False)])  # through one that offers no bandwidth
def test_relayed_members_reduce_where_no_other_can_or_where_it_pays(group: list[tuple[float, str, bool]]) -> None:
    members = [
        Member(
            PeerID(bytes([index]) * 32),
            bandwidth=bandwidth,
            listening=where == "tcp",
            auxiliary=auxiliary,
            addresses=() if where in ("", "tcp") else (f"relay://{where}/{index}",),
        )
        for index, (bandwidth, where, auxiliary) in enumerate(group)
    ]
    able = [index for index in range(len(members)) if can_reduce(members, index)]
    assume(able and not all(member.auxiliary for member in members))
    direct = [index for index in able if can_reduce(members, index, Dialable.DIRECTLY)]

    def best(among: list[int]) -> float:
        return min(
            slowest_link(members, division)
            for division in divisions(len(members), 16)
            if all(share == 0 or index in among for index, share in enumerate(division))
        )

    shares = reducing_shares(members, 1000)
    took = slowest_link(members, shares)
    assert all(share == 0 or index in able for index, share in enumerate(shares))
    if direct and all(share == 0 or index in direct for index, share in enumerate(shares)):
        assert took <= best(direct) * 1.002
    elif direct:
        assert 2 * took <= best(direct) * 1.002


def test_a_slow_direct_member_does_not_hold_up_those_at_quick_relays() -> None:
    names = [PeerID(bytes([index]) * 32) for index in range(3)]
    slow = Member(names[0], bandwidth=0.01, auxiliary=True)
    pair = [Member(name, listening=False, bandwidth=1.0, addresses=(f"relay://{name.text}x/",)) for name in names[1:]]
    assert reducing_shares([slow, *pair], 1000) != (1.0, 0.0, 0.0)
    alike = [Member(names[0], bandwidth=1.0, auxiliary=True), *pair]
    assert reducing_shares(alike, 1000) == (1.0, 0.0, 0.0)
