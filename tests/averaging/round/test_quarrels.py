"""Who reduces in another try, by whom each member says to have failed it."""

from __future__ import annotations

from fractions import Fraction

from swarmcli.averaging.round.attempt import without_quarrels


def alike(count: int) -> dict[int, int]:
    return dict.fromkeys(range(count), 1)


def test_two_that_fail_each_other_are_both_passed_over() -> None:
    assert without_quarrels({0: {1}, 1: {0}, 2: set(), 3: set()}, alike(4)) == {2, 3}


def test_few_that_name_everybody_are_passed_over_themselves() -> None:
    honest, liars = set(range(11)), set(range(11, 16))
    failed = {member: set(liars) for member in honest} | {member: set(honest) for member in liars}
    assert without_quarrels(failed, alike(16)) == honest
    unproved = {member: {11} for member in honest} | {member: set(honest) for member in liars}
    assert without_quarrels(unproved, alike(16)) == honest, "also where four of them had nothing to reduce"


def test_more_accusers_than_honest_members_weigh_no_more_than_their_votes() -> None:
    """Auxiliaries have none, and those of one network share one."""
    honest, liars = set(range(6)), set(range(6, 13))
    failed = {member: set() for member in honest} | {member: set(honest) for member in liars}
    assert without_quarrels(failed, alike(6)) == honest
    shared = alike(6) | dict.fromkeys(liars, Fraction(1, 7))
    assert without_quarrels(failed, shared) == honest


def test_of_two_the_one_that_the_other_names_reduces_no_more() -> None:
    assert without_quarrels({0: set(), 1: {0}}, alike(2)) == {1}
    assert without_quarrels({0: {1}, 1: {0}}, alike(2)) == {0, 1}
