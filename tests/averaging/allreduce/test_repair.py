"""Who gives what and who reduces what again, once reducers are lost; no network."""

from __future__ import annotations

from swarmcli.averaging.allreduce.holdings import NOTHING
from swarmcli.averaging.allreduce.repair import RepairPlan, plan_repair
from swarmcli.averaging.allreduce.results import digest_of_parts
from swarmcli.averaging.group import Member
from swarmcli.network import Identity

A, B, C, OTHER = b"a" * 32, b"b" * 32, b"c" * 32, b"x" * 32


def members(*kinds: str) -> list[Member]:
    """ "l": listens, "c": client mode, "x": auxiliary, "0": offers no bandwidth."""
    return [
        Member(Identity.from_seed(index).peer_id, "c" not in kind, "x" in kind, 0.0 if "0" in kind else 1.0)
        for index, kind in enumerate(kinds)
    ]


def plan(kinds: list[Member], holdings: dict[int, bytes], **options: object) -> RepairPlan:
    planned = plan_repair(kinds, holdings, 3, **options)  # type: ignore[arg-type]
    assert planned is not None
    return planned


def test_what_someone_holds_is_copied_and_what_nobody_holds_is_reduced_again() -> None:
    planned = plan(members("l", "l", "l"), {0: A + B + NOTHING, 1: A + NOTHING + NOTHING})
    assert planned.digests == A + B + NOTHING
    assert planned.sources == {1: 0, 2: planned.sources[2]} and planned.reduced_again.keys() == {2}
    assert planned.members == {0, 1}


def test_nothing_is_done_where_all_hold_the_same() -> None:
    planned = plan(members("l", "l", "x"), {0: A + B + C, 1: A + B + C, 2: NOTHING * 2 + C})
    assert planned.sources == {} and planned.digests == A + B + C


def test_deputies_share_the_work_and_are_those_who_offered_to_reduce() -> None:
    planned = plan(members("l", "l0", "lx"), dict.fromkeys(range(3), NOTHING * 3))
    assert set(planned.sources.values()) == {0, 2} and len(planned.reduced_again) == 3


def test_a_deputy_can_be_reached_by_all_who_send() -> None:
    holdings = {0: NOTHING * 3, 1: NOTHING * 3, 2: NOTHING * 3}
    assert set(plan(members("c", "c", "l"), holdings).sources.values()) == {2}
    assert plan_repair(members("c", "c", "c"), holdings, 3) is None


def test_whoever_gave_false_copies_gives_nothing_more() -> None:
    holdings = {0: A + B + C, 1: A + B + NOTHING, 2: A + B + C}
    assert plan(members("l", "l", "l"), holdings, suspects={0}).sources == {2: 2}
    alone = {0: A + B + C, 1: A + B + NOTHING}
    assert plan(members("l", "l", "l"), alone, suspects={0}).reduced_again == {2: 1}


def test_whoever_could_not_be_reached_by_some_is_asked_last() -> None:
    holdings = {0: A + B + C, 1: A + B + NOTHING, 2: A + B + C}
    assert plan(members("l", "l", "l"), holdings, doubted={0}).sources == {2: 2}
    assert plan(members("l", "l"), {0: A + B + C, 1: A + B + NOTHING}, doubted={0}).sources == {2: 0}


def test_a_bound_result_is_made_of_what_is_there_or_not_at_all() -> None:
    wanted = digest_of_parts(A + B + C)
    spread = {0: A + NOTHING + C, 1: A + B + NOTHING}
    planned = plan(members("l", "l"), spread, wanted=wanted)
    assert planned.digests == A + B + C and planned.sources == {1: 1, 2: 0}
    assert plan_repair(members("l", "l"), {0: A + NOTHING + C, 1: A + OTHER + C}, 3, wanted=wanted) is None
    lied = {0: A + OTHER + C, 1: A + B + C, 2: A + OTHER + C}
    assert plan(members("l", "l", "l"), lied, wanted=wanted).sources == {1: 1}


def test_of_unlike_averages_the_one_that_most_hold_becomes_everyones() -> None:
    planned = plan(members("l", "l", "l"), {0: A + OTHER + C, 1: A + B + C, 2: A + B + C})
    assert planned.digests == A + B + C and planned.sources.keys() == {1}
