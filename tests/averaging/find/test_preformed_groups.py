"""Groups that form while their members work, and begin when the sum of their progress is enough."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.averaging.step_control import AveragingStage, StepControl
from swarmcli.errors import FingerprintError, RoundMissed
from tests.averaging.averagers import Averagers, Peer, all_begun, all_results, assert_all_equal, assert_one_group
from tests.simulation import now, within


def stand(peers: list[Peer], target: float = 100.0, *, done: float = 0.0, **request: object) -> list[StepControl]:
    controls = [peer.begin(target=target, allow_retries=False, **request) for peer in peers]
    for control in controls:
        control.report(done)
    return controls


async def begun(controls: list[StepControl], within: float = 10.0) -> float:
    """Waits until the round of all of them has begun, and returns that time."""
    async with asyncio.timeout(within):
        await all_begun(controls)
    return now()


@within(3600)
async def test_it_begins_as_soon_as_the_sum_is_enough() -> None:
    async with Averagers(0) as swarm:
        peers = await swarm.add(4)
        controls = stand(peers, require_trigger=True)
        for step in range(1, 25):
            await asyncio.sleep(1.0)
            for control in controls:
                control.report(float(step))
        assert not any(control.begun.done() for control in controls)
        await asyncio.sleep(1.0)
        enough = now()
        for control in controls:
            control.report(25.0)
        assert await begun(controls) - enough < 0.2
        for control in controls:
            assert control.stage is AveragingStage.AWAITING_TRIGGER
            control.weight = 25.0
            control.allow_allreduce()
        assert_one_group(await all_results(controls), peers)
        assert_all_equal(peers, 1.5)


@within(3600)
async def test_a_newcomer_joins_and_at_rest_a_group_costs_a_few_messages_per_second() -> None:
    async with Averagers(0) as swarm:
        peers = await swarm.add(3)
        controls = stand(peers, done=20.0)
        await asyncio.sleep(30)
        before = sum(peer.endpoint.statistics().calls_made for peer in peers)
        await asyncio.sleep(60)
        # Beats of the followers, the leader's looks at the declarations, and the DHT's own upkeep.
        assert sum(peer.endpoint.statistics().calls_made for peer in peers) - before < 60 * 6
        newcomer = await swarm.add_one()
        controls += stand([newcomer])
        await asyncio.sleep(2)
        controls[-1].report(40.0)
        assert_one_group(await all_results(controls), swarm.peers)
        assert newcomer.rounds[0].members == peers[0].rounds[0].members


@pytest.mark.parametrize("how", ["kill", "freeze"])
@within(3600)
async def test_the_leader_is_lost_while_the_group_stands(how: str) -> None:
    async with Averagers(0) as swarm:
        peers = await swarm.add(4)
        controls = stand(peers, done=10.0)
        await asyncio.sleep(10)
        (dead,) = [peer for peer in peers if peer.search.call.leader is None]
        swarm.kill(dead) if how == "kill" else swarm.network.freeze(dead.peer_id)
        left = [control for control, peer in zip(controls, peers, strict=True) if peer is not dead]
        await asyncio.sleep(0.5 if how == "kill" else 5.0)
        began = now()
        for control in left:
            control.report(40.0)
        assert await begun(left) - began < 1.5
        assert_one_group(await all_results(left), [peer for peer in peers if peer is not dead])
        controls[peers.index(dead)].cancel()
        swarm.network.thaw(dead.peer_id)


@within(3600)
async def test_what_a_dead_member_did_does_not_count() -> None:
    async with Averagers(1) as swarm:
        peers = await swarm.add(3)
        controls = stand(peers)
        await asyncio.sleep(5)
        controls[0].report(60.0)
        controls[1].report(30.0)
        await asyncio.sleep(1)
        swarm.kill(peers[0])
        await asyncio.sleep(1)
        controls[2].report(30.0)
        await asyncio.sleep(20)
        assert not controls[1].begun.done()
        controls[2].report(70.0)
        assert_one_group(await all_results(controls[1:]), peers[1:])


@within(3600)
async def test_alone_it_stays_to_be_found_however_much_it_has_done() -> None:
    async with Averagers(2) as swarm:
        (peer,) = await swarm.add(1)
        (control,) = stand([peer], done=100.0)
        await asyncio.sleep(60)
        assert not control.done() and peer.rounds == []
        await all_results([control, *stand(await swarm.add(1), done=100.0)])


@within(3600)
async def test_one_that_lags_behind_is_waited_for_only_briefly() -> None:
    async with Averagers(3) as swarm:
        peers = await swarm.add(3)
        await all_results(stand(peers, done=100.0))
        controls = stand(peers[:2])  # the third is connected and was in the last round, but looks for no group now
        await asyncio.sleep(10)
        told = now()
        for control in controls:
            control.report(60.0)
        assert 0.9 < await begun(controls) - told < 1.5
        assert_one_group(await all_results(controls), peers[:2])
        assert len(peers[2].rounds) == 1


@pytest.mark.parametrize("hurried", [True, False])
@within(3600)
async def test_who_stops_to_wait_is_heard_at_once(hurried: bool) -> None:
    async with Averagers(6, latency=0.001) as swarm:
        controls = stand(await swarm.add(4), require_trigger=True)
        await asyncio.sleep(1.0)
        for control in controls:
            control.report(1.0)
        await asyncio.sleep(0.01)  # their leader has heard this, and would not hear the next for a while
        enough = now()
        for control in controls:
            control.report(25.0)
            if hurried:
                control.hurry()
        assert (await begun(controls) - enough < 0.01) is hurried


@within(3600)
async def test_other_terms_are_refused_at_both_ends_and_the_newcomer_is_told() -> None:
    async with Averagers(0) as swarm:
        peers = await swarm.add(2)
        controls = stand(peers, terms={"learning_rate": "a", "seed": "b"})
        await asyncio.sleep(5)
        stranger = await swarm.add_one()
        await asyncio.sleep(1)
        (refused,) = stand([stranger], terms={"learning_rate": "x", "seed": "b", "extra": "c"})
        with pytest.raises(FingerprintError, match="learning_rate") as caught:
            await refused
        assert caught.value.keys == ("extra", "learning_rate")
        assert "extra, learning_rate" in stranger.refusals[0].reason
        await asyncio.sleep(1)
        assert any(event.peer == stranger.peer_id.text for peer in peers for event in peer.refusals)
        for control in controls:
            control.report(60.0)
        assert_one_group(await all_results(controls), peers)


@within(3600)
async def test_who_was_there_first_does_not_give_way_to_a_newcomer_of_other_terms() -> None:
    async with Averagers(0) as swarm:
        (control,) = stand(await swarm.add(1), terms={"seed": "a"})
        await asyncio.sleep(5)
        (refused,) = stand(await swarm.add(1), terms={"seed": "b"})
        with pytest.raises(FingerprintError, match="refused by 1 peers"):
            await refused
        await asyncio.sleep(20)
        assert not control.done()
        control.cancel()


# Where there is one round for all


@pytest.mark.parametrize(("early", "late"), [(2, 2), (4, 3)])
@within(3600)
async def test_only_those_who_missed_it_do_not_begin_another(early: int, late: int) -> None:
    async with Averagers(early) as swarm:
        first, others = await swarm.add(early), await swarm.add(late)
        away = stand(first, 10.0, only_one=True, require_trigger=True)
        away[0].report(10.0)
        await begun(away)
        for moment in ("while the round is under way", "once it has committed"):
            came = now()
            for control in stand(others, 10.0, only_one=True, done=10.0):
                with pytest.raises(RoundMissed):
                    await control
            assert now() - came < 1, moment
            for control in away:
                control.allow_allreduce()
            await all_results(away)


@within(3600)
async def test_those_who_have_gone_on_since_this_peer_last_asked_them_have_begun_without_it() -> None:
    """The others' next search is older than this peer's: it asked them, they stepped, and then it began its search."""
    async with Averagers(2) as swarm:
        first, late = await swarm.add(2), await swarm.add_one()
        controls = stand(first, 10.0, tag=b"one", only_one=True)
        asked = late.node.endpoint.clock.now()
        controls[0].report(10.0)
        await all_results(controls)
        gone_on = stand(first, tag=b"two", only_one=True)
        await asyncio.sleep(0.1)
        (control,) = stand([late], 10.0, tag=b"one", only_one=True, since=asked)
        async with asyncio.timeout(1):
            with pytest.raises(RoundMissed):
                await control
        for each in gone_on:
            each.cancel()


@pytest.mark.parametrize("few_fail", [False, True])
@within(3600)
async def test_few_that_have_begun_do_not_hold_up_many_and_are_met_again_if_they_fail(few_fail: bool) -> None:
    async with Averagers(0) as swarm:
        few, many = await swarm.add(2), await swarm.add(3)
        away = stand(few, 10.0, only_one=True, require_trigger=True)
        away[0].report(10.0)
        await begun(away)
        for control in away:
            if few_fail:
                control.cancel()
        controls = stand([*few, *many] if few_fail else many, 10.0, only_one=True)
        await asyncio.sleep(1)
        controls[0].report(10.0)
        assert_one_group(await all_results(controls), [*few, *many] if few_fail else many)
