"""What peers that do not keep to the protocol can say while groups form, and what comes of it: nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from swarmcli.averaging.find.messages import (
    METHODS,
    Answer,
    Beat,
    Candidate,
    Join,
    Pulse,
    method_name,
    search_id,
)
from swarmcli.averaging.group import Group, Member
from swarmcli.errors import CallError, CallRefused, ConnectionLost
from swarmcli.network import Endpoint, PeerID, wire
from tests.averaging.averagers import Averagers, Peer, all_outcomes, all_results, assert_one_group
from tests.averaging.searchers import join_of
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
    leader = next(peer for peer in peers if peer.search.call.leader is None)
    follower = next(peer for peer in peers if peer.search.call.leader is not None)
    return peers, controls, Attacker(attacker.endpoint, leader), Attacker(attacker.endpoint, follower)


async def finish(peers: list[Peer], controls: list[Any]) -> None:
    """Asserts that the group is as it was, and begins."""
    await asyncio.sleep(5)
    for control in controls:
        control.report(40.0)
    assert_one_group(await all_results(controls), peers)


@within(3600)
async def test_strangers_have_no_say_in_a_group() -> None:
    async with Averagers(1) as swarm:
        peers, controls, at_leader, at_follower = await preformed(swarm)
        assert await at_leader.say(Beat(bytes(16), 1e9)) == Pulse() == await at_follower.say(Beat(bytes(16), 1e9))
        answer = await at_follower.say(asks_to_join(candidate_of(at_leader.endpoint.peer_id), at_follower.victim))
        assert answer.verdict == "ask" and answer.to.peer_id == at_leader.victim.peer_id
        with pytest.raises(CallRefused, match="only speak for itself"):
            await at_leader.say(join_of(candidate_of(peers[1].peer_id)))
        for tag, bits in ((b"", "1"), (b"other", "")):
            me = Candidate(at_leader.endpoint.peer_id, bytes(16), tag, True, ("memory://nowhere",), bits)
            with pytest.raises(CallRefused, match="not looking for such a group"):
                await at_leader.say(join_of(me))
        await finish(peers, controls)


def asks_to_join(candidate: Candidate, victim: Peer) -> Join:
    return msgspec.structs.replace(join_of(candidate), terms=victim.search.own.terms)


@pytest.mark.parametrize("old", [b"", bytes(16)])
@within(3600)
async def test_a_leader_cannot_bring_its_follower_into_an_old_group_again(old: bytes) -> None:
    """A group names the search with which each member came: so nobody signs two unlike things under one group's id,
    which would be evidence against it."""
    async with Averagers(1) as swarm:
        peers, controls, at_leader, at_follower = await preformed(swarm)
        leader, follower = at_leader.victim, at_follower.victim
        offered = [as_offered(leader), replace(as_offered(follower), search=old)]
        tell(leader, follower, offered)
        await asyncio.sleep(1)
        assert not controls[peers.index(follower)].begun.done()
        assert follower.core.trust.reason(leader.peer_id).startswith("it began an old group")


@within(3600)
async def test_a_leader_that_sends_no_list_leads_nobody() -> None:
    async with Averagers(1) as swarm:
        peers, controls, at_leader, at_follower = await preformed(swarm)
        leader, follower = at_leader.victim, at_follower.victim
        leader.search.lobby._end(follower.peer_id, Answer("begins", group=msgspec.Raw(wire.encode("no list"))))
        await asyncio.sleep(1)
        assert not controls[peers.index(follower)].begun.done()
        assert follower.core.trust.reason(leader.peer_id).startswith("its list is none")
        assert follower.core.trust.has_no_seat(leader.peer_id)


@within(3600)
async def test_a_leader_cannot_begin_before_its_members_have_claimed_enough() -> None:
    async with Averagers(1) as swarm:
        peers, controls, at_leader, at_follower = await preformed(swarm)
        leader, follower = at_leader.victim, at_follower.victim
        tell(leader, follower, [as_offered(leader, claim=99.0), as_offered(follower)])
        await asyncio.sleep(1)
        assert not controls[peers.index(follower)].begun.done()
        assert follower.core.trust.reason(leader.peer_id) == "it began a group without enough samples"


def as_offered(peer: Peer, claim: float = 0.0) -> Member:
    own, offer = peer.search.me, peer.search.own.offer
    return Member(own.peer_id, own.listening, addresses=own.addresses, search=own.search, bid=offer.bid, claim=claim)


def tell(leader: Peer, follower: Peer, members: list[Member]) -> None:
    """Ends the follower's call with a group of these, signed by its leader."""
    shares = [1.0, *(0.0 for _ in members[1:])]
    group = Group.form(b"", members, shares, bytes(16)).signed(leader.endpoint.identity)
    answer = Answer("begins", group=msgspec.Raw(wire.encode(group)))
    leader.search.lobby._end(follower.peer_id, answer)


@within(3600)
async def test_a_leader_cannot_keep_its_followers_from_each_other() -> None:
    """A leader tells its followers with which searches they came. This one names searches that are yet to come, which
    would make all earlier ones out of date."""
    async with Averagers(1) as swarm:
        peers, controls, at_leader, _ = await preformed(swarm)
        leader = at_leader.victim
        followers = [peer for peer in peers if peer is not leader]
        # It may say of itself what it likes, and has to name as much progress as the group needs.
        offered = [as_offered(leader, claim=100.0), *map(as_offered, followers)]
        for follower in followers:
            mine = follower.search.me.search
            searches = {leader.peer_id: offered[0].search, follower.peer_id: mine}
            told = [replace(entry, search=searches.get(entry.peer_id, b"\xff" * 16)) for entry in offered]
            tell(leader, follower, told)
        await asyncio.sleep(0.1)
        swarm.kill(leader)
        await all_outcomes([control for peer, control in zip(peers, controls, strict=True) if peer is not leader])
        async with asyncio.timeout(60):
            again = [peer.begin(allow_retries=False) for peer in followers]
            assert_one_group(await all_results(again), followers)


@within(3600)
async def test_a_follower_whose_call_has_broken_gets_its_group_all_the_same() -> None:
    async with Averagers(1) as swarm:
        peers, controls, at_leader, at_follower = await preformed(swarm)
        follower = at_follower.victim
        candidate = follower.search.me
        for control in controls:
            control.report(40.0)
        await asyncio.sleep(1)
        asks = Attacker(follower.endpoint, at_leader.victim)
        answer = await asks.say(join_of(candidate))
        assert answer.verdict == "begins" and wire.decode(Group, answer.group) == controls[0].group
        late = await asks.say(join_of(replace(candidate, search=search_id(9e9, bytes(8)))))
        assert late.verdict == "begun" and set(late.gone) == {peer.peer_id for peer in peers}
        assert_one_group(await all_results(controls), peers)


@pytest.mark.parametrize(
    "wrong",
    [
        {"patience": float("nan")},
        {"progress": float("inf")},
        {"terms": {"x": "x" * 1000}},
        {"offer": {"gathered": bytes(20000)}},
        {"offer": {"auxiliary": "yes"}},
    ],
)
@within(3600)
async def test_impossible_values_end_the_connection_and_nothing_else(wrong: dict[str, Any]) -> None:
    async with Averagers(2) as swarm:
        peers, controls, at_leader, _ = await preformed(swarm)
        me = candidate_of(at_leader.endpoint.peer_id, listening=False)
        said = msgspec.to_builtins(me, enc_hook=bytes)
        message = {"candidate": said, "offer": {}, "terms": {}, "since": 0.0, **wrong}
        with pytest.raises((ConnectionLost, CallError)):
            await at_leader.say(message, Join)
        assert len(at_leader.victim.search.lobby) == 3
        await finish(peers, controls)


@within(3600)
async def test_little_is_remembered_of_a_stranger_with_many_other_terms() -> None:
    async with Averagers(2) as swarm:
        peers, controls, at_leader, _ = await preformed(swarm)
        me = candidate_of(at_leader.endpoint.peer_id, listening=False)
        terms = {f"{number:>250}": "" for number in range(512)}
        answer = await at_leader.say(msgspec.structs.replace(join_of(me), terms=terms))
        assert answer.verdict == "terms"
        ((keys, _),) = at_leader.victim.search.known.conflicts.values()
        assert sum(map(len, keys)) < 10_000
        await finish(peers, controls)
