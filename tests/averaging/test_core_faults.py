"""Peers that die, freeze, are cut off or have wrong clocks, seen from whole rounds of AveragerCore."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest

from swarmcli.averaging import RoundResult
from swarmcli.averaging.config import AllreduceOptions, MatchmakingOptions
from swarmcli.testing import virtual_time
from tests.averaging.averagers import (
    FAST,
    Averagers,
    Peer,
    all_begun,
    all_outcomes,
    all_results,
    assert_all_equal,
    assert_one_group,
)
from tests.simulation import now, within
from tests.suites import soak


def mean_of(peers: list[Peer], everyone: list[Peer]) -> float:
    return sum(everyone.index(peer) for peer in peers) / len(peers)


@pytest.mark.parametrize(
    ("seed", "after"), [(0, 0.05), (1, 0.2), (2, 0.4), *soak((0, after) for after in (0.1, 0.3, 0.5))]
)
@within(3600)
async def test_one_that_is_killed_at_any_moment_is_done_without(seed: int, after: float) -> None:
    async with Averagers(seed) as swarm:
        peers = await swarm.add(5)
        controls = [peer.begin() for peer in peers]
        await asyncio.sleep(after)
        dead = peers[-1 - seed % 2]  # never the first contact of the hash table
        swarm.kill(dead)
        left = [peer for peer in peers if peer is not dead]
        results = await all_results([controls[peers.index(peer)] for peer in left])
        controls[peers.index(dead)].cancel()
        assert_rounds_agree(results, left)
        assert now() < 15


def assert_rounds_agree(results: list[RoundResult], peers: list[Peer]) -> None:
    """Members of one round hold the same bits."""
    by_round: dict[bytes, list[Peer]] = {}
    for result, peer in zip(results, peers, strict=True):
        by_round.setdefault(result.group.group_id, []).append(peer)
    for members in by_round.values():
        assert_all_equal(members, members[0].values[0])


@pytest.mark.parametrize("seed", range(2))
@within(3600)
async def test_a_leader_that_dies_between_beginning_and_reducing(seed: int) -> None:
    async with Averagers(seed) as swarm:
        peers = await swarm.add(4)
        controls = [peer.begin(require_trigger=True) for peer in peers]
        group = await all_begun(controls)
        leader = next(peer for peer in peers if peer.peer_id == group.leader)
        swarm.kill(leader)
        left = [peer for peer in peers if peer is not leader]
        for control in controls:
            control.allow_allreduce()
        outcomes = await all_outcomes([controls[peers.index(peer)] for peer in left])
        controls[peers.index(leader)].cancel()
        assert all(isinstance(outcome, RoundResult) for outcome in outcomes)
        assert_all_equal(left, mean_of(left, peers))
        assert [[each.outcome for each in peer.rounds] for peer in left] == [["failed", "committed"]] * 3
        again = await all_results([peer.begin() for peer in left])
        assert_one_group(again, left)


@within(3600)
async def test_a_round_that_fails_leaves_the_tensors_and_is_tried_again_without_the_culprit() -> None:
    async with Averagers(1) as swarm:
        peers = await swarm.add(4, allreduce=replace(FAST, trust="members"))  # of strangers half decides nothing
        controls = [peer.begin(require_trigger=True) for peer in peers]
        group = await all_begun(controls)
        dead = [peer for peer in reversed(peers) if peer.peer_id != group.leader][:2]
        for peer in dead:  # with half of the group gone nothing can be committed
            swarm.kill(peer)
        left = [peer for peer in peers if peer not in dead]
        for peer in left:
            controls[peers.index(peer)].allow_allreduce()
        results = await all_results([controls[peers.index(peer)] for peer in left])
        for peer in dead:
            controls[peers.index(peer)].cancel()
        assert_one_group(results, left)
        assert_all_equal(left, mean_of(left, peers))
        for peer in left:
            first, second = peer.rounds
            assert (first.outcome, second.outcome) == ("failed", "committed")
            assert first.reason and first.round_id != second.round_id


@within(3600)
async def test_one_that_all_others_follow_is_followed_by_who_suspects_it_too() -> None:
    async with Averagers(1) as swarm:
        leader, follower, wary = peers = await swarm.add(3)
        await all_results([peer.begin() for peer in peers])
        wary.core.finder.suspect(leader.peer_id, "it was too slow")
        queue, began = [peer.peer_id for peer in [leader, wary, follower]], now()
        assert_one_group(await all_results([peer.begin(queue=queue) for peer in peers]), peers)
        assert now() - began < MatchmakingOptions().min_matchmaking_time


@within(3600)
async def test_one_that_does_not_hear_that_its_group_begins_is_not_waited_for() -> None:
    patient = AllreduceOptions()  # a member may take a minute for its last batch
    async with Averagers(3) as swarm:
        peers = await swarm.add(3, allreduce=patient)
        controls = [peer.begin(target=30.0, allow_retries=False) for peer in peers]
        await asyncio.sleep(5)
        deaf = next(peer for peer in peers if peer.search.call.leader is not None)
        deaf.core.finder.search = None  # as if it had just left, and the messages had crossed
        began = now()
        for control in controls:
            control.report(10.0)
        left = [control for control, peer in zip(controls, peers, strict=True) if peer is not deaf]
        await all_outcomes(left)
        assert now() - began < 10
        controls[peers.index(deaf)].cancel()


MOMENTS = [("timeout", 0, -0.01), ("timeout", 1, 0.0), ("cancel", 1, -0.01), ("cancel", 0, 0.01)]
OTHERS = itertools.product(["timeout", "cancel"], [0, 1], [-0.02, -0.01, -1e-9, 0.0, 1e-9, 0.01, 0.02])


@pytest.mark.parametrize(("how", "who", "shift"), [*MOMENTS, *soak(case for case in OTHERS if case not in MOMENTS)])
def test_giving_up_in_the_very_moment_in_which_the_group_begins(shift: float, who: int, how: str) -> None:
    async def main(leave_after: float | None) -> float:
        async with Averagers(5) as swarm:
            peers = await swarm.add(2, allreduce=AllreduceOptions())
            began = now()
            timeouts = [leave_after if how == "timeout" and index == who else 20.0 for index in range(2)]
            controls = [peer.begin(timeout=timeout) for peer, timeout in zip(peers, timeouts, strict=True)]
            if leave_after is not None and how == "cancel":
                asyncio.get_running_loop().call_later(leave_after, controls[who].cancel)
            outcomes = await asyncio.gather(*controls, return_exceptions=True)
            if leave_after is not None:
                assert now() - began < 25
                committed = [isinstance(outcome, RoundResult) for outcome in outcomes]
                assert committed[who] or how == "cancel" or not any(committed)
                return 0.0
            return float(outcomes[who].seconds["looking for group"])

    formed = virtual_time.run(main(None), seed=5, timeout=3600)
    virtual_time.run(main(formed + shift), seed=5, timeout=3600)


@pytest.mark.parametrize(("errors", "seed"), [([0, 600], 0), ([0, 0, 0, 600, 0, -600, 0, 0, 600], 1)])
@within(3600)
async def test_clocks_ten_minutes_off(errors: list[float], seed: int) -> None:
    async with Averagers(seed) as swarm:
        for error in errors:
            await swarm.add_one(clock_error=error)
        for _ in range(2):
            began = now()
            results = await all_results([peer.begin() for peer in swarm.peers])
            assert_one_group(results, swarm.peers)
            assert now() - began < 1.5
        assert_all_equal(swarm.peers, (len(errors) - 1) / 2)
