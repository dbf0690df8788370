"""Whole rounds of AveragerCore: from strangers to one average, under virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from swarmcli.averaging import RoundResult
from swarmcli.averaging.step_control import AveragingStage, RoundRequest, StepControl
from swarmcli.errors import MatchmakingError, NoReducerError, RoundFailed
from tests.averaging.averagers import (
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


@pytest.mark.parametrize(("count", "seed"), [(2, 0), (5, 0), *soak([(2, 1), (5, 1), (16, 0), (64, 0)])])
@within(3600)
async def test_peers_that_step_together_share_one_average(count: int, seed: int) -> None:
    async with Averagers(seed) as swarm:
        peers = await swarm.add(count)
        began = now()
        results = await all_results([peer.begin() for peer in peers])
        assert_one_group(results, peers)
        assert_all_equal(peers, (count - 1) / 2)
        assert now() - began < 1.5  # round trips take 0.02 s here


@within(3600)
async def test_weights_results_and_events() -> None:
    async with Averagers(2) as swarm:
        peers = await swarm.add(3)
        weights = [1.0, 0.0, 3.0]
        controls = [
            peer.begin(weight=weight, gather={"n": n}, epoch=7)
            for n, (peer, weight) in enumerate(zip(peers, weights, strict=True))
        ]
        results = await all_results(controls)
        assert_all_equal(peers, 1.5)
        for peer, result in zip(peers, results, strict=True):
            assert dict(result) == {other.peer_id: {"n": n} for n, other in enumerate(peers)}
            assert result.total_weight == 4.0
            assert {peers[0].peer_id, peers[2].peer_id} <= set(result.contributors)
            (event,) = peer.rounds
            assert (event.outcome, event.reason, event.epoch) == ("committed", "", 7)
            assert event.round_id == result.group.group_id.hex()
            assert event.members == tuple(member.peer_id.text for member in result.group.members)
            assert event.leader == result.group.leader.text and event.purpose == "test"
            assert set(event.seconds) == {"looking for group", "awaiting trigger", "running all-reduce"}
        assert {control.stage for control in controls} == {AveragingStage.FINISHED}
        assert sum(result.bytes_sent for result in results) > 0


@within(3600)
async def test_averaging_alpha_moves_by_a_fraction() -> None:
    async with Averagers(4) as swarm:
        peers = await swarm.add(2, averaging_alpha=0.5)
        await all_results([peer.begin() for peer in peers])
        assert [peer.values for peer in peers] == [[0.25, 2.5], [0.75, 7.5]]


@pytest.mark.parametrize("seed", range(3))
@within(3600)
async def test_listening_client_mode_and_auxiliary_peers_together(seed: int) -> None:
    async with Averagers(seed) as swarm:
        trainers = [await swarm.add_one(), await swarm.add_one(listening=False), await swarm.add_one()]
        helpers = [
            await swarm.add_one(auxiliary=True),
            await swarm.add_one(auxiliary=True, listening=False),
            await swarm.add_one(listening=False),
        ]
        trainers.append(helpers.pop())
        results = await all_results([peer.begin() for peer in swarm.peers])
        assert_one_group(results, swarm.peers)
        assert_all_equal(trainers, (0 + 1 + 2 + 5) / 4)
        assert results[0].group.members[0].listening
        assert [helper.values for helper in helpers] == [[3.0, 30.0], [4.0, 40.0]]


@within(3600)
async def test_a_swarm_that_nobody_can_dial_says_so() -> None:
    async with Averagers(5) as swarm:
        await swarm.add_one()  # the first contact takes no part
        clients = await swarm.add(2, listening=False)
        outcomes = await all_outcomes([peer.begin(allow_retries=False) for peer in clients])
        assert all(isinstance(outcome, NoReducerError) for outcome in outcomes)
        assert "none of 2 peers" in str(outcomes[0]) and "dialed" in str(outcomes[0])
        assert clients[0].rounds[0].round_id == "" and clients[0].rounds[0].outcome == "failed"


@within(3600)
async def test_bandwidths_share_the_work() -> None:
    async with Averagers(7) as swarm:
        peers = [await swarm.add_one(bandwidth=speed, shapes=((8000,),)) for speed in (1.0, 3.0, 2.0, None)]
        (result, *_) = await all_results([peer.begin() for peer in peers])
        speeds = {member.peer_id: member.bandwidth for member in result.group.members}
        assert [speeds[peer.peer_id] for peer in peers] == [0.5, 1.5, 1.0, 1.0]
        shares = dict(zip(speeds, result.group.part_shares, strict=True))
        assert shares[peers[0].peer_id] < shares[peers[1].peer_id]


@within(3600)
async def test_other_shapes_are_other_terms() -> None:
    async with Averagers(8) as swarm:
        one = await swarm.add_one()
        other = await swarm.add_one(shapes=((4, 4),))
        await all_outcomes([peer.begin(timeout=3.0) for peer in (one, other)])
        assert "averaging.tensors" in one.refusals[0].reason and "averaging.tensors" in other.refusals[0].reason


@within(3600)
async def test_timeout_bounds_the_search() -> None:
    async with Averagers(9) as swarm:
        (peer,) = await swarm.add(1)
        with pytest.raises(MatchmakingError, match="within 2"):
            await peer.begin(timeout=2.5)
        assert now() < 3.0


@within(3600)
async def test_a_request_may_look_on_longer() -> None:
    async with Averagers(9) as swarm:
        peers = await swarm.add(3)
        await all_results([peer.begin() for peer in peers])
        late = [peer.begin(lookout=20.0, allow_retries=False) for peer in peers[:2]]
        await asyncio.sleep(15)
        results = await all_results([*late, peers[2].begin()])
        assert all(len(result) == 3 for result in results)
        with pytest.raises(ValueError, match="lookout must be None or a positive number"):
            RoundRequest(lookout=0.0)


@within(3600)
async def test_a_scheduled_round_begins_at_its_time_and_may_be_moved() -> None:
    async with Averagers(10) as swarm:
        peers = await swarm.add(2)
        swarm_time = peers[0].endpoint.clock.now
        planned = swarm_time() + 10
        controls = [peer.begin(scheduled_time=planned) for peer in peers]
        for control in controls:
            control.scheduled_time = planned + 5
        await all_begun(controls)
        assert planned + 5 <= swarm_time() < planned + 6
        assert_one_group(await all_results(controls), peers)


@within(3600)
async def test_tensors_are_exclusive() -> None:
    async with Averagers(12) as swarm:
        peers = await swarm.add(2)
        async with peers[0].core.tensors() as tensors:
            controls = [peer.begin() for peer in peers]
            await asyncio.sleep(3)
            assert not controls[0].done()
            tensors[0].fill_(5.0)
        await all_results(controls)
        assert [peer.values[0] for peer in peers] == [3.0, 3.0]


@within(3600)
async def test_other_tensors_may_be_taken_up_between_rounds() -> None:
    async with Averagers(12) as swarm:
        peers = await swarm.add(2)
        await all_results([peer.begin() for peer in peers])
        first = [(tensor, tensor.clone()) for peer in peers for tensor in peer.core._tensors]
        others = [[torch.full((2, 3), value), torch.zeros(5)] for value in (2.0, 8.0)]
        for peer, tensors in zip(peers, others, strict=True):
            with pytest.raises(ValueError, match="only floating point tensors"):
                await peer.core.take_up([torch.tensor(1)])
            assert peer.core.layout.numel != 11
            await peer.core.take_up(tensors)
            assert peer.core.layout.numel == 11
        await all_results([peer.begin() for peer in peers])
        assert all(tensors[0].tolist() == [[5.0] * 3] * 2 for tensors in others)
        assert all(torch.equal(tensor, before) for tensor, before in first)


@pytest.mark.parametrize("who", ["leader", "follower"])
@within(3600)
async def test_whoever_cancels_once_the_group_has_begun_is_done_without(who: str) -> None:
    async with Averagers(14) as swarm:
        *peers, hasty = await swarm.add(4)
        at_once = hasty.begin()
        assert at_once.cancel()  # before its first step
        controls = [peer.begin(require_trigger=True) for peer in peers]
        await all_begun(controls)
        quitter = (_leading(controls, peers) + (who == "follower")) % 3
        controls[quitter].cancel()
        began, stayed = now(), [control for i, control in enumerate(controls) if i != quitter]
        for control in stayed:
            control.allow_allreduce()
        assert all(isinstance(outcome, RoundResult) for outcome in await all_outcomes(stayed))
        assert now() - began < 3.0  # nobody waits for the one that left
        assert_all_equal([peer for i, peer in enumerate(peers) if i != quitter], (3 - quitter) / 2)
        assert peers[quitter].values[0] == quitter
        assert controls[quitter].cancelled() and at_once.cancelled() and not at_once.cancel()
        assert isinstance(at_once.begun.exception(0), RoundFailed)


@pytest.mark.parametrize("who", ["leader", "follower"])
@within(3600)
async def test_whoever_cancels_while_the_group_forms_is_missed_at_once(who: str) -> None:
    async with Averagers(14) as swarm:
        peers = await swarm.add(4)
        controls = [peer.begin(target=40.0) for peer in peers]
        await asyncio.sleep(5)
        leads = [peer.search.call.leader is None for peer in peers]
        quitter = leads.index(who == "leader")
        controls[quitter].cancel()
        await asyncio.sleep(0.3)
        left = [peer for index, peer in enumerate(peers) if index != quitter]
        searches = [peer.search for peer in left]
        assert sorted(len(search.lobby) for search in searches) == [1, 1, 3]
        assert sum(search.call.leader is None for search in searches) == 1
        for index in range(4):
            controls[index].report(15.0)
        assert_one_group(await all_results([c for i, c in enumerate(controls) if i != quitter]), left)


@within(3600)
async def test_tries_that_fail_at_once_are_spaced_out() -> None:
    async with Averagers(18) as swarm:
        (peer,) = await swarm.add(1)
        tries: list[float] = []

        async def fail(*arguments: object) -> None:
            tries.append(now())
            raise MatchmakingError("within a moment")

        peer.core.finder.find = fail
        control = peer.begin()
        await asyncio.sleep(60)
        assert 10 < len(tries) < 25
        control.cancel()


@within(3600)
async def test_gathered_data_has_a_bound_and_shutdown_cancels() -> None:
    async with Averagers(17) as swarm:
        (peer,) = await swarm.add(1)
        with pytest.raises(ValueError, match="gather"):
            peer.begin(gather=bytes(20000))
        control = peer.begin()
        await peer.core.shutdown()
        assert control.cancelled() and control.stage is AveragingStage.FINISHED
        with pytest.raises(RuntimeError, match="not running"):
            peer.core.begin_round(RoundRequest())


def _leading(controls: list[StepControl], peers: list[Peer]) -> int:
    """The index of the peer that leads the group which has begun."""
    group = controls[0].group
    assert group is not None
    return next(index for index, peer in enumerate(peers) if peer.peer_id == group.leader)


@pytest.mark.parametrize(
    ("options", "weight", "words"),
    [
        ({}, 0.0, "nobody had any weight"),
        ({"auxiliary": True}, 1.0, "only auxiliaries came"),
        ({"tensors": [torch.zeros(0), torch.zeros(3, 0)]}, 1.0, "have no elements"),
        ({"tensors": []}, 1.0, "have no elements"),
    ],
)
@within(3600)
async def test_where_there_is_nothing_to_average_the_round_ends_at_once_and_says_why(
    options: dict[str, Any], weight: float, words: str
) -> None:
    async with Averagers(1) as swarm:
        peers = await swarm.add(3, **options)
        before = [tensor.clone() for peer in peers for tensor in peer.core._tensors]
        results = await all_results([peer.begin(weight=weight, gather=number) for number, peer in enumerate(peers)])
        assert all(map(torch.equal, before, (tensor for peer in peers for tensor in peer.core._tensors)))
        assert_one_group(results, peers)
        for peer, result in zip(peers, results, strict=True):
            assert words in result.remark and words in peer.rounds[0].reason
            assert (result.total_weight, result.contributors) == (0.0, ()) and sorted(result.values()) == [0, 1, 2]
        assert weight == 0 or peers[0].rounds[0].seconds["running all-reduce"] == 0
