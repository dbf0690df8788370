"""Rounds among peers that nobody can dial directly, on the memory network under virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from swarmcli.averaging import RoundResult
from swarmcli.averaging.trust import WORK_GROUPS
from swarmcli.network.addresses import parse_address
from swarmcli.network.identity import PeerID
from tests.averaging import rounds
from tests.averaging.averagers import Averagers, Peer, all_begun, all_results, assert_all_equal, assert_one_group
from tests.averaging.searchers import Searchers
from tests.simulation import within
from tests.suites import soak


async def one_round(peers: Sequence[Peer]) -> list[RoundResult]:
    return await all_results([peer.begin(timeout=60.0) for peer in peers])


@within(300)
async def test_clients_that_all_have_a_relay_find_each_other_and_one_leads() -> None:
    async with Averagers(1) as swarm:
        await swarm.add_one(relays=True)  # a contact that takes part in no round
        peers = await swarm.add(3, listening=False, relays=True)
        results = await one_round(peers)
        assert_one_group(results, peers)
        assert_all_equal(peers, 2.0)
        assert not any(member.listening for member in results[0].group.members)
        assert results[0].group.part_shares == pytest.approx((1 / 3, 1 / 3, 1 / 3))


@pytest.mark.parametrize("auxiliary", [True, False])
@within(300)
async def test_who_can_be_dialed_directly_leads_and_reduces(auxiliary: bool) -> None:
    async with Averagers(2) as swarm:
        [helper] = await swarm.add(1, auxiliary=auxiliary, relays=True)
        await swarm.add(2, listening=False, relays=True)
        await swarm.add(1, listening=False)
        [result, *_] = await one_round(swarm.peers)
        assert result.group.leader == helper.peer_id
        assert result.group.part_shares == (1.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("after", [1.0, *soak([0.1, 0.5, 1.5, 2.0])])
@within(600)
async def test_when_a_relay_is_killed_in_the_middle_of_a_round_all_end_with_equal_bits(after: float) -> None:
    async with Averagers(4) as swarm:
        relays = await swarm.add(3, relays=True)
        peers = await swarm.add(3, listening=False, relays=True, shapes=((100, 1000), (40,)))
        for peer in peers:
            swarm.network.set_bandwidth(peer.peer_id, 4e5)
        controls = [peer.begin(timeout=60.0) for peer in peers]
        await all_begun(controls)
        await asyncio.sleep(after)
        [used, *_] = [parse_address(address).relay for address in peers[0].endpoint.addresses]
        swarm.kill(next(relay for relay in relays if relay.peer_id == used))
        results = await all_results(controls)
        assert_one_group(results, peers)
        assert len(results[0].contributors) == 3
        for own, *others in zip(*(peer.core._tensors for peer in peers), strict=True):
            assert all(torch.equal(own, other) for other in others)
        again = await one_round(peers)
        assert_one_group(again, peers)
        assert len(again[0].contributors) == 3
        assert all(str(used) not in address for peer in peers for address in peer.endpoint.addresses)


@within(300)
async def test_who_failed_as_a_reducer_gets_no_parts_for_a_while_unless_nobody_else_could() -> None:
    async with Searchers(3) as swarm:
        peers = [await swarm.add() for _ in range(3)]
        failed = {peer.peer_id for peer in peers[:2]}

        async def reducing() -> set[PeerID]:
            [group, *_] = await asyncio.gather(*(peer.find(timeout=30.0) for peer in peers))
            assert group is not None
            return {m.peer_id for m, share in zip(group.members, group.part_shares, strict=True) if share}

        for peer in peers:
            for each in failed:
                peer.trust.suspect(each, "it failed", seat=False, work=True)
        assert await reducing() == {peers[2].peer_id}
        for peer in peers:
            for _ in range(WORK_GROUPS):
                peer.trust.note_group(frozenset())
        assert await reducing() == {peer.peer_id for peer in peers}
        for peer in peers:
            for each in peers:
                peer.trust.suspect(each.peer_id, "it failed", seat=False, work=True)
        assert await reducing() == {peer.peer_id for peer in peers}, "somebody has to"


@within(300)
async def test_two_that_cannot_dial_each_other_are_named_as_failed_reducers() -> None:
    async with rounds.Swarm([rounds.Kind(), rounds.Kind(), rounds.Kind()]) as swarm:
        first, *apart = (peer.peer_id for peer in swarm.peers)
        swarm.network.cut(*apart)
        results = swarm.check(await swarm.round())  # who can reach all gives the two what they lack
        assert len(results) == 3 and all(set(result.failed) <= set(apart) for result in results)
        assert any(result.failed for result in results) and first not in apart


@within(300)
async def test_what_only_a_client_holds_is_fetched_from_it_when_the_leader_has_died() -> None:
    kinds = [rounds.Kind(), rounds.Kind(bandwidth=0), rounds.Kind(listening=False, bandwidth=0)]
    async with rounds.Swarm(kinds) as swarm:
        swarm.network.set_bandwidths(swarm.peers[1].peer_id, uplink=1e6, downlink=500.0)

        async def kill() -> None:
            await asyncio.wait(swarm.tasks[::2])
            swarm.kill(0)
            swarm.network.set_bandwidth(swarm.peers[1].peer_id, 1e6)

        outcomes = await swarm.round(kill)
        assert len(swarm.check(outcomes)) == 3
        assert isinstance(outcomes[1], RoundResult) and outcomes[1].late
