"""Who has drifted is told by the sketches of all, in the same way at every member, and liars gain little."""

import math
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from swarmcli.network.identity import PeerID
from swarmcli.optim.state.drift import LONGEST_PAUSE, RepairPace, judge
from swarmcli.optim.state.sketch import BUCKETS, Sketch


def peer(number: int) -> PeerID:
    return PeerID(number.to_bytes(32, "big"))


def group(*offsets: float, scale: float = 1.0) -> dict[PeerID, Sketch]:
    """Members whose states are so far apart, along one direction, relative to their length of 1 (times `scale`)."""
    return {
        peer(number): Sketch((scale, scale * offset, *[0.0] * (BUCKETS - 2))) for number, offset in enumerate(offsets)
    }


TABLE = [
    # offsets, strays, average
    ((0.0,), [], False),
    ((0.0, 0.0), [], False),
    ((0.0, 0.0009), [], False),
    ((0.0, 0.002), [], True),
    ((0.0, 0.0, 0.002), [2], False),
    ((0.002, 0.0, 0.0), [0], False),
    ((0.0, 0.002, 0.004), [], True),
    ((0.0, 0.0, 0.5, 0.5), [], True),
    ((0.0, 0.0, 0.0, 0.5, 0.9), [3, 4], False),
    ((0.0, 0.0008, 0.0016), [], False),  # the one in the middle is close to both
    ((math.nan, 0.0), [0], False),
    ((math.inf, 0.0, 0.0), [0], False),
    ((math.nan, 0.0, 0.5), [], True),
    ((math.nan, math.nan), [], False),  # nobody has anything to repair it from
]


@pytest.mark.parametrize(("offsets", "strays", "average"), TABLE)
def test_a_majority_stays_and_without_one_all_average(offsets: tuple, strays: list, average: bool) -> None:
    verdict = judge(group(*offsets))
    assert (verdict.strays, verdict.average) == (tuple(peer(number) for number in strays), average)
    assert not set(verdict.strays) & set(verdict.cluster)


@given(
    st.lists(st.sampled_from([0.0, 1e-4, 0.002, 0.5, 1e9, math.nan]), min_size=1, max_size=9), st.floats(1e-20, 1e20)
)
def test_it_depends_on_ratios_and_a_majority_is_never_sent_away(offsets: list, scale: float) -> None:
    verdict = judge(group(*offsets))
    scaled = judge(group(*offsets, scale=scale))
    assert (scaled.strays, scaled.average, scaled.cluster) == (verdict.strays, verdict.average, verdict.cluster)
    honest = [index for index, offset in enumerate(offsets) if offset in (0.0, 1e-4)]
    if 2 * len(honest) > len(offsets):
        assert set(verdict.cluster) == {peer(index) for index in honest}
        assert set(verdict.strays) == {peer(index) for index in range(len(offsets))} - set(verdict.cluster)
    if not verdict.average:
        assert set(verdict.strays) | set(verdict.cluster) in (set(verdict.distances), set())


def test_distances_are_relative_to_the_usual_length() -> None:
    verdict = judge(group(0.0, 0.0, 0.25, scale=40.0))
    assert list(verdict.distances.values()) == [0.0, 0.0, pytest.approx(0.25)]
    assert judge(group(0.0, math.nan)).distances[peer(1)] == math.inf


def test_a_long_sketch_does_not_stretch_the_tolerance() -> None:
    liar = Sketch((1e30, *[0.0] * (BUCKETS - 1)))
    honest = group(0.0, 0.0, 0.5)
    for sketches in ({peer(9): liar, **honest}, {**honest, peer(9): liar}):
        verdict = judge(sketches)
        assert verdict.average  # two of four
    five = {peer(9): liar, **group(0.0, 0.0, 0.0, 0.5)}
    assert set(judge(five).strays) == {peer(9), peer(3)}


@pytest.mark.parametrize("honest", [2, 3, 8])
def test_a_single_liar_makes_nobody_download(honest: int) -> None:
    drawn = random.Random(honest)
    for _ in range(100):
        lie = Sketch(tuple(drawn.choice([1.0, 1e30, -3.0, math.inf, math.nan, 0.0]) for _ in range(BUCKETS)))
        verdict = judge({peer(99): lie, **group(*[0.0] * honest)})
        assert set(verdict.strays) == {peer(99)}
        assert not verdict.average


def test_parameters_that_are_all_zero_can_be_judged() -> None:
    zero = Sketch((0.0,) * BUCKETS)
    one = Sketch((1.0,) * BUCKETS)
    assert judge({peer(0): zero, peer(1): zero}).cluster == (peer(0), peer(1))
    assert judge({peer(0): zero, peer(1): zero, peer(2): one}).strays == (peer(2),)


def test_useless_repairs_come_ever_more_rarely() -> None:
    pace = RepairPace()
    assert [epoch for epoch in range(40) if pace.is_due(epoch)] == [0, 1, 3, 7, 15, 31]
    for _ in range(5):  # that members agree in between is no excuse, or liars would only have to pause
        pace.found_close()
    assert not pace.is_due(40)
    late = [epoch for epoch in range(40, 1000) if pace.is_due(epoch)]
    assert late[-1] - late[-2] == LONGEST_PAUSE


def test_repairs_that_were_of_use_count_for_nothing() -> None:
    pace = RepairPace()
    for epoch in range(5):
        assert pace.is_due(epoch)
        pace.was_of_use()
    assert [epoch for epoch in range(5, 20) if pace.is_due(epoch)] == [5, 6, 8, 12]


def test_long_agreement_is_forgiving() -> None:
    pace = RepairPace()
    first = [epoch for epoch in range(40) if pace.is_due(epoch)]
    for _ in range(len(first) * LONGEST_PAUSE):
        pace.found_close()
    assert [epoch for epoch in range(1000, 1008) if pace.is_due(epoch)] == [1000, 1001, 1003, 1007]
