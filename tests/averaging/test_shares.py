"""Shares of the reducing work: as good as the best division found by trying, and only where everyone can reach."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarmcli.averaging.group import Dialable, Member, meeting
from swarmcli.averaging.shares import reducing_shares, slowest_line
from swarmcli.errors import NoReducerError
from swarmcli.network.identity import PeerID


def members_of(*kinds: tuple[float, bool, bool]) -> list[Member]:
    """Members from (bandwidth, listening, auxiliary)."""
    return [
        Member(PeerID(bytes([index]) * 32), bandwidth=bandwidth, listening=listening, auxiliary=auxiliary)
        for index, (bandwidth, listening, auxiliary) in enumerate(kinds)
    ]


kinds = st.tuples(st.sampled_from([0.0, 1.0, 2.0, 5.0, 10.0, 0.1]), st.booleans(), st.booleans())


def can_reduce(members: Sequence[Member], index: int, way: Dialable = Dialable.OVER_RELAY) -> bool:
    me = members[index]
    others = (other for other in members if other is not me and not other.auxiliary)
    return me.bandwidth > 0 and all(meeting(me, other) >= way for other in others)


def test_a_helper_reduces_what_its_line_carries_where_averages_are_larger_than_what_came() -> None:
    """Four trainers and a helper five times as quick: of dense sums it reduces everything, of sparse ones two thirds,
    since it sends 3.2 times as much for each of them. All of it would take half as long again."""
    members = members_of(*[(1.0, True, False)] * 4, (5.0, True, True))
    assert reducing_shares(members, 1000)[4] == pytest.approx(1, abs=1e-5)
    shares = reducing_shares(members, 1000, back=3.2)
    assert shares[4] == pytest.approx(0.668, abs=1e-3) and shares[:4] == pytest.approx([shares[0]] * 4)
    assert slowest_line(members, (0, 0, 0, 0, 1), 3.2) == pytest.approx(
        1.495 * slowest_line(members, shares, 3.2), rel=1e-3
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


@pytest.mark.parametrize(
    ("bandwidths", "expected"),
    [
        ((3, 3, 3, 3), (0.25,) * 4),
        ((3, 1), (0.75, 0.25)),  # although any division between two senders takes as long
        ((10, 10, 0.1), (0.5, 0.5, 0.0)),
    ],
)
def test_members_share_by_what_their_links_carry(bandwidths: Sequence[float], expected: Sequence[float]) -> None:
    shares = reducing_shares(members_of(*[(each, True, False) for each in bandwidths]), 1000)
    assert shares == pytest.approx(expected, abs=1e-6)


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
    """The least time of a round of three senders or more with these bandwidths, found by bisection."""
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
    assert slowest_line(members, shares) == pytest.approx(least_time(senders, auxiliaries), rel=1e-5)


def relayed(relay: PeerID | str, name: int) -> Member:
    text = relay if isinstance(relay, str) else relay.text
    return Member(PeerID(bytes([name]) * 32), listening=False, addresses=(f"relay://{text}/",))


@pytest.mark.parametrize(
    ("bandwidth", "reduces_all"), [(1.0, True), (0.6, True), (0.01, False)], ids=["quick", "slower", "holds all up"]
)
def test_members_behind_relays_take_work_last(bandwidth: float, reduces_all: bool) -> None:
    """Only where the one who can be dialed is so slow that others would wait for it, and is not their relay."""
    direct = Member(PeerID(bytes([9]) * 32), bandwidth=bandwidth, auxiliary=True)
    elsewhere = [direct, relayed("aa", 1), relayed("aa", 2)]
    assert (reducing_shares(elsewhere, 1000) == (1.0, 0.0, 0.0)) == reduces_all
    there = [direct, relayed(direct.peer_id, 1), relayed(direct.peer_id, 2)]
    assert reducing_shares(there, 1000) == (1.0, 0.0, 0.0)
    assert sum(reducing_shares(elsewhere[1:], 1000)) == pytest.approx(1.0), "nobody else can"
