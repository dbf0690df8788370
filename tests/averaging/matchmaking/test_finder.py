"""What peers that do not keep to the protocol can say while groups form, and what comes of it: nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from swarmcli.averaging.group import Group, Member
from swarmcli.averaging.matchmaking.messages import (
    METHODS,
    Answer,
    Begin,
    Candidate,
    GroupInvitation,
    Heartbeat,
    Join,
    Leave,
    Progress,
    Pulse,
    method_name,
    rank_of,
    search_id,
)
from swarmcli.errors import CallError, CallRefused, ConnectionLost
from swarmcli.network import Endpoint, PeerID
from tests.averaging.averagers import Averagers, Peer, all_outcomes, all_results, assert_one_group
from tests.averaging.table import join_of
from tests.simulation import within


def candidate_of(peer: PeerID, *, listening: bool = True, search: bytes = bytes(16)) -> Candidate:
    return Candidate(peer, search, b"", listening, ("memory://nowhere",))


class Attacker:
    """Speaks to one averager with whatever words it likes."""

    def __init__(self, endpoint: Endpoint, victim: Peer) -> None:
        self.endpoint = endpoint
        self.victim = victim

    async def say(self, message: Any, kind: type[Any] | None = None) -> Any:
        kind = kind or type(message)
        method, answer = method_name("test", kind), METHODS[kind][1]
        return await self.endpoint.call(self.victim.peer_id, method, message, answer, timeout=5)


async def preformed(swarm: Averagers) -> tuple[list[Peer], list[Any], Attacker, Attacker]:
    """Three averagers in a preformed group, an endpoint that attacks its leader, and one that attacks a follower."""
    peers = await swarm.add(4)
    attacker = peers.pop()
    controls = [peer.begin(target=100.0, allow_retries=False) for peer in peers]
    await asyncio.sleep(5)
    leader = next(peer for peer in peers if peer.search.leader is None)
    follower = next(peer for peer in peers if peer.search.leader is not None)
    return peers, controls, Attacker(attacker.endpoint, leader), Attacker(attacker.endpoint, follower)


async def finish(peers: list[Peer], controls: list[Any]) -> None:
    """The group is as it was, and begins."""
    await asyncio.sleep(5)
    for control in controls:
        control.report(40.0)
    assert_one_group(await all_results(controls), peers)


@within(3600)
async def test_nobody_speaks_for_another() -> None:
    async with Averagers(0) as swarm:
        peers, controls, at_leader, _ = await preformed(swarm)
        other = candidate_of(peers[1].peer_id)
        with pytest.raises(CallRefused, match="only speak for itself"):
            await at_leader.say(join_of(other))
        with pytest.raises(CallRefused, match="only speak for itself"):
            await at_leader.say(GroupInvitation(other, other))
        await finish(peers, controls)


@within(3600)
async def test_strangers_have_no_say_in_a_group() -> None:
    async with Averagers(1) as swarm:
        peers, controls, at_leader, at_follower = await preformed(swarm)
        me = at_leader.endpoint.peer_id
        assert await at_leader.say(Progress(bytes(16), 1e9)) == Pulse(False)
        assert await at_follower.say(Heartbeat(bytes(16), 3600.0, 1000)) == Pulse(False, 0.0)
        await at_leader.say(Leave(bytes(16)))
        await at_follower.say(Leave(bytes(16)))
        search = at_follower.victim.search.me.search
        members = [Member(me), Member(at_follower.victim.peer_id)]
        own = Group.form(b"", members, [1.0, 0.0], bytes(16))
        with pytest.raises(CallRefused, match="not waiting"):
            await at_follower.say(Begin(search, own))
        foreign = Group.form(b"", members[::-1], [1.0, 0.0], bytes(16))
        with pytest.raises(CallRefused, match="not waiting"):
            await at_follower.say(Begin(search, foreign))
        at_follower.endpoint = at_leader.victim.endpoint  # its leader may begin a group, and none of another
        strangers = Group.form(b"", [Member(me), Member(at_follower.victim.peer_id)], [1.0, 0.0], bytes(16))
        with pytest.raises(CallRefused, match="only its leader"):
            await at_follower.say(Begin(search, strangers))
        await finish(peers, controls)


@within(3600)
async def test_a_leader_cannot_bring_its_follower_into_an_old_group_again() -> None:
    """A group names the search with which each member came: so nobody signs two unlike things under one group's id,
    which would be evidence against it."""
    async with Averagers(1) as swarm:
        peers, controls, at_leader, at_follower = await preformed(swarm)
        follower, leader = at_follower.victim, at_leader.victim
        at_follower.endpoint = leader.endpoint  # the leader itself says it
        search, mine = follower.search.me.search, leader.search.me.search
        for old in (b"", bytes(16)):
            members = [Member(leader.peer_id, search=mine), Member(follower.peer_id, search=old)]
            with pytest.raises(CallRefused, match="not waiting"):
                await at_follower.say(Begin(search, Group.form(b"", members, [1.0, 0.0], bytes(16))))
        await finish(peers, controls)


def as_offered(peer: Peer) -> Member:
    own, offer = peer.search.me, peer.search.own.offer
    return Member(own.peer_id, own.listening, addresses=own.addresses, search=own.search, bid=offer.bid)


@within(3600)
async def test_a_leader_cannot_keep_its_followers_from_each_other() -> None:
    """It says with which searches they came; a search to come, so named, would make all before it out of date."""
    async with Averagers(1) as swarm:
        peers, controls, at_leader, _ = await preformed(swarm)
        leader = at_leader.victim
        followers = [peer for peer in peers if peer is not leader]
        began = [peer.search.me.search for peer in peers]
        # It may say of itself what it likes, and has to name as much progress as the group needs.
        offered = [replace(as_offered(leader), claim=100.0), *(as_offered(peer) for peer in followers)]
        for follower in followers:
            true = dict(zip((peer.peer_id for peer in peers), began, strict=True))
            mine = true[follower.peer_id]
            named = {peer: mine if peer == follower.peer_id else b"\xff" * 16 for peer in true}
            members = [replace(entry, search=named[entry.peer_id]) for entry in offered]
            liar = Attacker(leader.endpoint, follower)
            group = Group.form(b"", members, [1.0, 0.0, 0.0], bytes(16)).signed(leader.endpoint.identity)
            assert await liar.say(Begin(mine, group)) == Pulse(True)
        swarm.kill(leader)
        await all_outcomes([control for peer, control in zip(peers, controls, strict=True) if peer is not leader])
        async with asyncio.timeout(60):
            again = [peer.begin(allow_retries=False) for peer in followers]
            assert_one_group(await all_results(again), followers)


@pytest.mark.parametrize(("tag", "bits"), [(b"", "1"), (b"other", "")])
@within(3600)
async def test_requests_for_another_bucket_are_refused(tag: bytes, bits: str) -> None:
    async with Averagers(1) as swarm:
        peers, controls, at_leader, _ = await preformed(swarm)
        me = Candidate(at_leader.endpoint.peer_id, bytes(16), tag, True, ("memory://nowhere",), bits)
        with pytest.raises(CallRefused, match="not looking for such a group"):
            await at_leader.say(join_of(me))
        with pytest.raises(CallRefused, match="not looking for such a group"):
            await at_leader.say(GroupInvitation(me, me))
        await finish(peers, controls)


@pytest.mark.parametrize(
    "wrong",
    [
        {"patience": -1.0},
        {"patience": float("nan")},
        {"progress": float("inf")},
        {"terms": {"x": "x" * 1000}},
        {"offer": {"bandwidth": -2.0}},
        {"offer": {"gathered": bytes(20000)}},
        {"offer": {"auxiliary": "yes"}},
    ],
)
@within(3600)
async def test_impossible_values_end_the_connection_and_nothing_else(wrong: dict[str, Any]) -> None:
    async with Averagers(2) as swarm:
        peers, controls, at_leader, _ = await preformed(swarm)
        me = candidate_of(at_leader.endpoint.peer_id, listening=False)
        message = {
            "candidate": msgspec.to_builtins(me, enc_hook=bytes),
            "offer": {},
            "terms": {},
            "since": 0.0,
            **wrong,
        }
        with pytest.raises((ConnectionLost, CallError)):
            await at_leader.say(message, Join)
        assert len(at_leader.victim.search.gathering) == 3
        await finish(peers, controls)


@within(3600)
async def test_an_endless_leader_cannot_take_a_group_away_for_good() -> None:
    """Somebody who ranks first invites everyone, accepts everyone, and then never begins nor beats."""
    async with Averagers(3) as swarm:
        peers, controls, at_leader, _ = await preformed(swarm)
        attacker = swarm.peers[-1]
        await attacker.core.shutdown()
        leader_rank = at_leader.victim.search.rank
        me = next(
            made
            for made in (
                Candidate(attacker.peer_id, search_id(1.0, number.to_bytes(8, "big")), b"", True)
                for number in range(10_000)
            )
            if rank_of(made) < leader_rank
        )

        async def accept(peer: PeerID, message: Join) -> Answer:
            return Answer("accepted", me)

        attacker.endpoint.serve(method_name("test", Join), Join, accept)
        assert (await at_leader.say(GroupInvitation(me, me))).verdict == "coming"
        await asyncio.sleep(30)
        await finish(peers, controls)
