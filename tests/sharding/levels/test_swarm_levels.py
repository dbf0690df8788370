"""Levels of swarm groups: whoever is there, up to a size; what fails leaves everything as it was and is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from swarmcli.averaging import AveragerCore, RoundRequest
from swarmcli.errors import FingerprintError, StateDownloadError
from swarmcli.sharding.levels.plan import LevelAverage
from tests.sharding.levels.swarm import Peer, Swarm, in_swarm, odd_tensors
from tests.suites import soak

PLACES = ["europe/paris", "europe/paris", "europe/rome", "asia/delhi"]


def groups_of(results: list[LevelAverage | None]) -> list[tuple[str, int]]:
    assert all(result is not None for result in results)
    return [(result.group, result.members) for result in results if result is not None]


def values_of(peers: list[Peer]) -> list[float]:
    return [peer.value for peer in peers]


@in_swarm(1)
async def test_places_are_groups(swarm: Swarm) -> None:
    for place in PLACES:
        await swarm.add({1: 4, 2: 8, 4: None}, place)
    assert groups_of(await swarm.average()) == [("everyone", 4)] * 4
    assert values_of(swarm.peers) == [1.5] * 4
    for number, peer in enumerate(swarm.peers):
        peer.tensors[0].fill_(number)
    results = await swarm.average()
    assert groups_of(results) == [("europe/paris", 2)] * 2 + [("europe/rome", 0), ("asia/delhi", 0)]
    assert values_of(swarm.peers) == [0.5, 0.5, 2.0, 3.0]
    assert groups_of(await swarm.average()) == [("europe", 3)] * 3 + [("asia", 0)]
    assert values_of(swarm.peers) == [1.0, 1.0, 1.0, 3.0]
    assert [peer.step for peer in swarm.peers] == [3] * 4


@in_swarm(2)
async def test_who_is_alone_is_told_and_keeps_what_it_has(swarm: Swarm) -> None:
    peer = await swarm.add({1: 4, 4: 4}, "attic", value=7.0, matchmaking_time=3.0)
    before = asyncio.get_running_loop().time()
    (result,) = await swarm.average()
    assert asyncio.get_running_loop().time() - before <= 3.5
    assert result is not None and not result.averaged
    assert "only 1 of at least 2 peers" in result.reason
    assert peer.value == 7.0
    assert peer.step == 1
    assert [(event.outcome, event.epoch, event.purpose) for event in peer.rounds] == [("failed", 0, "run/")]


@in_swarm(3)
async def test_sizes_are_upper_bounds(swarm: Swarm) -> None:
    for _ in range(7):
        await swarm.add({1: 3})
    results = groups_of(await swarm.average())
    assert sorted(members for _, members in results) in ([2, 2, 2, 2, 3, 3, 3],)
    assert sum(values_of(swarm.peers)) == pytest.approx(21.0)


@in_swarm(4)
async def test_tensors_of_all_kinds_are_averaged_where_they_are_and_equal_in_every_bit(swarm: Swarm) -> None:
    for number in range(3):
        drawn = torch.randn(10_001, generator=torch.Generator().manual_seed(number))
        await swarm.add({1: 8}, tensors=[*odd_tensors(float(number)), drawn])
    before = [(each.data_ptr(), each.stride()) for each in swarm.peers[0].tensors]
    assert groups_of(await swarm.average()) == [("everyone", 3)] * 3
    first, *others = (peer.tensors for peer in swarm.peers)
    assert [(each.data_ptr(), each.stride()) for each in first] == before
    assert all(torch.equal(own, torch.full_like(own, 1.0)) for own in first[:-1])
    assert all(torch.equal(own, other) for tensors in others for own, other in zip(first, tensors, strict=True))
    swarm.peers[0].tensors.clear()
    (result,) = await swarm.average(swarm.peers[0])
    assert result is not None and (result.averaged, result.reason) == (False, "no parameter has a gradient")


@pytest.mark.parametrize("seed", range(5))
@in_swarm(0)
async def test_a_member_dies_during_a_round(swarm: Swarm, seed: int) -> None:
    for number in range(4):
        await swarm.add({1: 8}, tensors=[torch.full((300_000,), float(number))])
    survivors = swarm.peers[:3]
    await swarm.average()
    for number, peer in enumerate(swarm.peers):
        peer.tensors[0].fill_(float(number))
    victim = asyncio.ensure_future(swarm.peers[3].average())
    rounds = asyncio.gather(*(peer.average() for peer in survivors))
    await asyncio.sleep(0.05 + 0.03 * seed)
    swarm.kill(swarm.peers[3].node)
    results = await rounds
    victim.cancel()
    await asyncio.wait([victim])
    assert len({peer.value for peer in survivors}) == 1
    assert groups_of(results) in ([("everyone", 3)] * 3, [("everyone", 4)] * 3)
    assert survivors[0].value == pytest.approx(1.0 if results[0] and results[0].members == 3 else 1.5)


@in_swarm(25)
async def test_who_is_left_of_a_group_finds_another(swarm: Swarm) -> None:
    for number in range(3):
        await swarm.add({1: 2}, tensors=[torch.full((2_000_000,), float(number))])
    left, lost, other = swarm.peers
    doomed = asyncio.ensure_future(lost.average())
    survivor = asyncio.ensure_future(left.average())
    for _ in range(500):
        await asyncio.sleep(0.01)
        if left.levels._averagers and left.levels._averagers[0]._lock.locked():
            break  # their round has begun
    swarm.kill(lost.node)
    results = groups_of([await other.average(), await survivor])
    doomed.cancel()
    await asyncio.wait([doomed])
    assert results == [("everyone", 2)] * 2
    assert values_of([left, other]) == [1.0, 1.0]
    assert [event.outcome for event in left.rounds] == ["failed", "committed"]


@pytest.mark.parametrize("ahead", [0, *soak([1])])
@in_swarm(20)
async def test_two_who_are_a_step_apart_come_together(swarm: Swarm, ahead: int) -> None:
    """Each would look for the other at the level that its own step says, at the same time, forever."""
    for number in range(2):
        await swarm.add({1: 4, 2: 4, 4: 4}, "europe/paris")
        swarm.peers[number].step = 4 + (number == ahead)
    results = []
    for _ in range(4):
        results.append(groups_of(await swarm.average()))
        await asyncio.sleep(1.0)  # they compute
    assert {group for group, _ in results[0]} == {"everyone", "europe/paris"}  # and so nobody found anybody
    assert results[1:] == [[("europe", 2)] * 2, [("europe/paris", 2)] * 2, [("everyone", 2)] * 2]
    assert {peer.step for peer in swarm.peers} == {9}


@in_swarm(24)
async def test_who_is_behind_goes_by_the_others_also_when_no_level_is_due(swarm: Swarm) -> None:
    ahead, behind = await swarm.add({4: 4}), await swarm.add({4: 4})
    assert groups_of(await swarm.average()) == [("everyone", 2)] * 2
    for _ in range(6):
        await ahead.average()  # at step 4 it finds nobody
    await asyncio.sleep(1.0)  # what it said last has arrived
    await behind.average()
    assert (ahead.step, behind.step) == (7, 7)
    assert await swarm.average() == [None, None]
    assert groups_of(await swarm.average()) == [("everyone", 2)] * 2


@in_swarm(21)
async def test_a_newcomer_meets_the_one_who_waits(swarm: Swarm) -> None:
    first = await swarm.add({1: 4, 4: 4}, "here", value=3.0)
    waiting = asyncio.ensure_future(first.average())
    await asyncio.sleep(1.0)
    newcomer = await swarm.add({1: 4, 4: 4}, "here", value=100.0)
    newcomer.step = await newcomer.download(10.0) or 0
    assert newcomer.value == 3.0
    assert groups_of([await newcomer.average(), await waiting]) == [("everyone", 2)] * 2
    assert groups_of(await swarm.average()) == [("here", 2)] * 2


@in_swarm(23)
async def test_nobody_is_led_on_by_one_who_claims_to_be_far_ahead(swarm: Swarm) -> None:
    honest = [await swarm.add({1: 8}) for _ in range(3)]
    await swarm.average()
    liar = await swarm.add({1: 8})
    liar.step = 1 << 39
    await swarm.average(liar)
    for _ in range(3):
        assert groups_of(await swarm.average())[:3] == [("everyone", 4)] * 3
    assert {peer.step for peer in honest} == {4}


@pytest.mark.parametrize("claim", [-1, 1 << 60, True, 9.0])
@in_swarm(7)
async def test_steps_that_nobody_can_have_are_not_believed(swarm: Swarm, claim: Any) -> None:
    honest, liar = await swarm.add({1: 2}), await swarm.add({1: 2})
    honest.step = 5
    averager = AveragerCore(liar.tensors, liar.node, liar.config)
    await averager.start()
    lying = averager.begin_round(RoundRequest(gather=claim))
    result = await honest.average()
    await lying
    await averager.shutdown()
    assert result is not None and result.averaged
    assert (result.step, honest.step) == (5, 6)


@in_swarm(8)
async def test_peers_with_fewer_levels_meet_the_others_at_those(swarm: Swarm) -> None:
    await swarm.add({1: 4, 2: 4, 4: None}, "europe/paris")
    await swarm.add({2: 4, 4: None}, "europe")
    for peer in swarm.peers:
        peer.step = 2
    assert groups_of(await swarm.average()) == [("europe", 2)] * 2


@in_swarm(9)
async def test_other_parameters_are_refused_by_name(swarm: Swarm) -> None:
    veteran = await swarm.add({1: 4})
    await veteran.average()
    newcomer = await swarm.add({1: 4}, tensors=[torch.ones(5)])
    alone = asyncio.ensure_future(veteran.average())
    with pytest.raises(FingerprintError, match=r"averaging\.tensors"):
        await newcomer.average()
    assert groups_of([await alone]) == [("everyone", 0)]
    assert newcomer.step == 0
    assert newcomer.tensors[0].tolist() == [1.0] * 5


@in_swarm(12)
async def test_parameters_that_are_no_numbers_stay_out(swarm: Swarm) -> None:
    for _ in range(3):
        await swarm.add({1: 4})
    swarm.peers[2].tensors[0][1] = float("nan")
    results = groups_of(await swarm.average())
    assert results == [("everyone", 2)] * 3
    assert values_of(swarm.peers) == [0.5] * 3
    swarm.peers[0].tensors[0][1] = float("inf")
    for peer in swarm.peers[1:]:
        peer.tensors[1].fill_(float("nan"))
    (result, *_) = await swarm.average()
    assert result is not None and result.reason.startswith("nobody in the group had parameters")
    assert swarm.peers[0].tensors[0][1].item() == float("inf")


@in_swarm(16)
async def test_a_newcomer_that_has_nothing_of_the_others_gives_nothing(swarm: Swarm) -> None:
    veterans = [await swarm.add({1: 4}, value=1.0) for _ in range(2)]
    for _ in range(3):
        await swarm.average()
    fresh = await swarm.add({1: 4}, value=100.0, matchmaking_time=2.0)
    assert groups_of([await fresh.average()]) == [("everyone", 0)]
    await asyncio.sleep(1.0)
    for _ in range(3):
        newcomer = await swarm.add({1: 4}, value=50.0)
        assert await newcomer.download(30.0) == 2
        assert newcomer.value == 1.0
        await newcomer.levels.shutdown()
    assert groups_of(await swarm.average(*veterans, fresh)) == [("everyone", 3)] * 3
    await asyncio.sleep(10.0)  # donors keep for a while what they have copied
    assert await fresh.download(30.0) == 3


@in_swarm(15)
async def test_copies_that_were_never_filled_are_given_to_nobody(swarm: Swarm) -> None:
    """They would show what else was in the memory of the process."""
    donor, stranger = await swarm.add({1: 4}), await swarm.add({1: 4})
    asking = AveragerCore(stranger.tensors, stranger.node, stranger.config)
    await asking.start()
    others = [torch.ones(3, 3), torch.ones(3)]
    for tensors in (donor.tensors, others):
        places = range(len(tensors))
        assert await donor.levels.download(tensors, 5.0, places) is None  # the copies are made, and nothing for them
        await asyncio.sleep(1.0)
        with pytest.raises(StateDownloadError, match="averaged no parameters"):
            await asking.sharing.download(5.0)
        await donor.levels.take_step(tensors, 7, places)
        state = await asking.sharing.download(5.0)
        assert state is not None and state.metadata["step"] == 7
        assert all(map(torch.equal, state.tensors.values(), tensors))
    await asking.shutdown()


@in_swarm(14)
async def test_where_there_is_nothing_that_fits_nothing_is_taken_over(swarm: Swarm) -> None:
    first, second = await swarm.add({1: 4}), await swarm.add({1: 4})
    assert await first.download(30.0) is None
    first.tensors[0][0] = float("nan")  # nothing to go on from either
    await swarm.average(first)
    assert await second.download(30.0) is None
    assert second.value == 1.0
    first.tensors[0][0] = 0.0
    other = await swarm.add({1: 4}, tensors=[torch.ones(5)])
    await swarm.average(first, second)
    assert await other.download(30.0) is None
    assert other.tensors[0].tolist() == [1.0] * 5


@in_swarm(10)
async def test_parameters_of_equal_shapes_are_told_apart_by_their_places(swarm: Swarm) -> None:
    first = await swarm.add({1: 4}, tensors=[torch.ones(5)])
    await first.levels.take_step(first.tensors, 0, [0])
    second = await swarm.add({1: 4}, tensors=[torch.zeros(5)])
    alone = asyncio.ensure_future(first.levels.take_step(first.tensors, 1, [0]))
    with pytest.raises(FingerprintError, match=r"averaging\.tensors"):
        await second.levels.take_step(second.tensors, 1, [1])
    assert groups_of([(await alone)[1]]) == [("everyone", 0)]
    assert await second.levels.download(second.tensors, 5.0, [1]) is None
    assert (first.value, second.value) == (1.0, 0.0)
    results = await asyncio.gather(*(peer.levels.take_step(peer.tensors, 2, [1]) for peer in (first, second)))
    assert groups_of([average for _, average in results]) == [("everyone", 2)] * 2
    assert (first.value, second.value) == (0.5, 0.5)
