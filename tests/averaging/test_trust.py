"""Suspicion costs a seat or work for a while, and a proof bans; nobody fills the memory of the others."""

from __future__ import annotations

import asyncio

import torch

from swarmcli.averaging.audit.signed import AVERAGES, SignedAverages
from swarmcli.averaging.config import AveragerConfig
from swarmcli.averaging.core import AveragerCore
from swarmcli.averaging.trust import MOST_GROUPS, PeerTrust, ProofMessage, ProofTaken, TwoGroups, UnlikeAverages
from swarmcli.compression import NoCompression
from swarmcli.errors import CallRefused
from swarmcli.events import PeerBanned
from swarmcli.journal.describe import describe
from swarmcli.network import Endpoint, Identity
from swarmcli.optim.state.averaging import state_config
from swarmcli.testing import MemoryNetwork
from tests.averaging.averagers import Averagers, Peer, all_results, assert_one_group
from tests.network.closed_runs import ClosedRunWorld, ClosedSwarm
from tests.simulation import simulated

BAD, GOOD = Identity.from_seed("bad").peer_id, Identity.from_seed("good").peer_id
GROUP_ID = bytes(32)


def trust() -> PeerTrust:
    return PeerTrust(Endpoint(MemoryNetwork().transport(Identity.from_seed("me"))), "test")


# Suspicion


def test_each_further_suspicion_costs_twice_as_many_groups_up_to_a_bound() -> None:
    mine = trust()
    for times in range(8):
        mine.suspect(BAD, "again")
        assert mine.reason(BAD) == "again" and not mine.has_no_seat(GOOD)
        groups = 0
        while mine.has_no_seat(BAD):
            mine.note_group(frozenset({GOOD}))
            groups += 1
        assert groups == min(2**times, MOST_GROUPS)


def test_a_reducer_that_failed_keeps_its_seat_and_gets_no_work_for_longer_each_time() -> None:
    mine = trust()
    for groups in (16, 32, 64):
        for _ in range(2):  # two causes in one round cost no more than one
            mine.suspect(BAD, "it failed", seat=False, work=True)
        assert not mine.has_no_seat(BAD)
        for _ in range(groups):
            assert mine.has_no_work(BAD)
            mine.note_group(frozenset({GOOD, BAD}))
        assert not mine.has_no_work(BAD)


def test_a_peer_whose_connection_broke_keeps_its_seat_unless_it_happens_again_at_once() -> None:
    mine = trust()
    mine.suspect(BAD, "it did not begin", lost=True)
    assert not mine.has_no_seat(BAD)
    mine.suspect(BAD, "it did not begin", lost=True)
    assert mine.has_no_seat(BAD)
    mine.suspect(GOOD, "it did not begin", lost=True)
    mine.note_group(frozenset({GOOD}))
    mine.suspect(GOOD, "it did not begin", lost=True)
    assert not mine.has_no_seat(GOOD)


def test_a_suspect_to_which_other_leaders_give_a_seat_has_one_here_after_as_many_groups() -> None:
    mine = trust()
    for _ in range(3):
        mine.suspect(BAD, "again")
    mine.note_group(frozenset({GOOD, BAD}))  # the round in which it gave cause
    for _ in range(4):
        assert mine.has_no_seat(BAD)
        mine.note_group(frozenset({GOOD, BAD}))
    assert not mine.has_no_seat(BAD) and mine.reason(BAD)


def test_a_peer_that_takes_part_is_trusted_again_in_the_end() -> None:
    mine = trust()
    mine.suspect(BAD, "once")
    mine.suspect(BAD, "twice")
    for _ in range(2):
        mine.note_group(frozenset({GOOD}))
    assert not mine.has_no_seat(BAD)
    for _ in range(2):
        mine.note_group(frozenset({GOOD, BAD}))
    assert mine.reason(BAD) == ""


def test_who_is_needed_has_its_seat_again_the_sooner_the_less_it_did() -> None:
    mine = trust()
    for _ in range(4):
        mine.suspect(BAD, "again")
    mine.suspect(GOOD, "once")
    assert not mine.admit(0.9)
    assert mine.admit(1.0)
    assert not mine.has_no_seat(GOOD) and mine.has_no_seat(BAD)
    assert not mine.admit(7.9) and mine.admit(8.0)
    assert not mine.has_no_seat(BAD)
    mine.suspect(BAD, "again")
    assert not mine.admit(15.9), "it stays suspect: the next time costs twice as much"


# Proofs


def signed(liar: Identity, root: bytes, prefix: str = "test") -> SignedAverages:
    return SignedAverages(root, liar.sign(AVERAGES, prefix.encode(), GROUP_ID, root))


def proof_against(liar: Identity) -> UnlikeAverages:
    first, second = signed(liar, b"a" * 32), signed(liar, b"b" * 32)
    return UnlikeAverages(liar.peer_id, "test", GROUP_ID, first, second)


def test_two_signatures_under_unlike_averages_are_a_proof_and_everything_else_is_none() -> None:
    liar, other = Identity.from_seed(1), Identity.from_seed(2)
    a, b = signed(liar, b"a" * 32), signed(liar, b"b" * 32)
    assert UnlikeAverages(liar.peer_id, "test", GROUP_ID, a, b).verify()
    assert not UnlikeAverages(liar.peer_id, "test", GROUP_ID, a, a).verify()
    assert not UnlikeAverages(other.peer_id, "test", GROUP_ID, a, b).verify()
    assert not UnlikeAverages(liar.peer_id, "test", b"1" * 32, a, b).verify()
    # An honest reducer may have both in two averagers to which a liar gave one group.
    assert not UnlikeAverages(liar.peer_id, "test", GROUP_ID, a, signed(liar, b"b" * 32, "another")).verify()


def test_two_groups_that_a_leader_signed_in_one_search_are_a_proof_and_everything_else_is_none() -> None:
    leader, other = Identity.from_seed(1), Identity.from_seed(2)
    groups = b"a" * 32, b"b" * 32
    first, second = (leader.sign("list", b"search", group_id) for group_id in groups)
    later = leader.sign("list", b"a later search", groups[1])
    assert TwoGroups(leader.peer_id, b"search", groups, (first, second)).verify()
    assert not TwoGroups(leader.peer_id, b"search", groups, (first, later)).verify()
    assert not TwoGroups(leader.peer_id, b"search", (groups[0], groups[0]), (first, first)).verify()
    assert not TwoGroups(other.peer_id, b"search", groups, (first, second)).verify()


@simulated
async def test_members_of_one_group_learn_of_a_ban_as_one_line_and_form_groups_without_the_liar() -> None:
    async with Averagers(3) as swarm:
        *honest, liar = await swarm.add(4)
        await all_results([peer.begin() for peer in [*honest, liar]])
        proof = proof_against(Identity.from_seed(b"3/3"))
        assert honest[0].core.trust.prove(proof) and honest[0].core.trust.prove(proof)
        await asyncio.sleep(5)
        for peer in honest:
            assert peer.core.trust.is_banned(liar.peer_id)
            assert [event for event in peer.events if isinstance(event, PeerBanned)] == [
                PeerBanned(liar.peer_id.text, proof.words())
            ]
        controls = [peer.begin(timeout=30.0) for peer in honest]
        lonely = liar.begin(timeout=20.0, allow_retries=False)
        assert_one_group(await all_results(controls), honest)
        assert (await asyncio.gather(lonely, return_exceptions=True))[0] is not None
    line = describe(PeerBanned("a" * 52, "it voted twice"))
    assert line is not None and line.level == "warning"
    assert line.text == "aaaaaaaaaa is banned from this run: it voted twice"


@simulated
async def test_who_knows_of_a_liar_on_its_list_takes_no_part_and_shows_its_leader_why() -> None:
    async with Averagers(6) as swarm:
        peers = await swarm.add(3)
        controls = [peer.begin(target=30.0, allow_retries=False) for peer in peers]
        await asyncio.sleep(5)
        (leader,) = [peer for peer in peers if peer.search.call.leader is None]
        knows, liar = [peer for peer in peers if peer is not leader]
        assert knows.core.trust.prove(proof_against(Identity.from_seed(f"6/{peers.index(liar)}".encode())))
        for control in controls:
            control.report(10.0)
        await asyncio.sleep(1)
        assert not controls[peers.index(knows)].begun.done()
        assert leader.core.trust.is_banned(liar.peer_id)
        for control in controls:
            control.cancel()


@simulated
async def test_nobody_is_banned_by_what_proves_nothing_and_its_teller_is_not_heard_again() -> None:
    async with Averagers(4) as swarm:
        honest, liar, victim = peers = await swarm.add(3)
        await all_results([peer.begin() for peer in peers])
        good, throwaway = proof_against(Identity.from_seed(b"4/2")), Identity.from_seed(b"someone")
        assert good.culprit == victim.peer_id
        false = UnlikeAverages(victim.peer_id, "test", GROUP_ID, good.first, good.first)
        # Of identities that are in no group with this peer nothing is kept, however true.
        told = (proof_against(throwaway), "not heard"), (false, "false proof"), (good, "not heard")
        for proof, code in told:
            assert await refusal(liar, honest, ProofMessage(proof)) == code
        assert not any(map(honest.core.trust.is_banned, (victim.peer_id, throwaway.peer_id)))


async def refusal(teller: Peer, hearer: Peer, message: ProofMessage) -> str:
    try:
        await teller.endpoint.call(hearer.peer_id, hearer.core.trust.method, message, ProofTaken, timeout=5)
    except CallRefused as error:
        return error.code
    return ""


@simulated
async def test_in_a_closed_run_who_averages_nothing_hears_of_a_liar_too() -> None:
    async with ClosedSwarm(world := ClosedRunWorld()) as swarm:
        nodes = [await swarm.add(world.member(seed)) for seed in range(3)]
        finder, owner, _ = trusts = [PeerTrust.of(node.endpoint, "run") for node in nodes]
        for each in trusts:
            each.start()
        liar = Identity.from_seed("liar")
        assert finder.prove(proof_against(liar))
        await asyncio.sleep(2)
        assert owner.is_banned(liar.peer_id)
        for each in trusts:
            await each.stop()


@simulated
async def test_all_averagers_of_a_run_at_one_peer_share_their_trust() -> None:
    async with Averagers(5) as swarm:
        peer = await swarm.add_one(prefix="run_grads", run="run")
        config = state_config("run", peer.core.config, NoCompression())
        states = AveragerCore([torch.zeros(3)], peer.node, config)
        alone = AveragerCore([torch.zeros(3)], peer.node, AveragerConfig(prefix="run_states"))
        liar = Identity.from_seed(b"liar")
        assert peer.core.trust.prove(proof_against(liar))
        assert states.trust.is_banned(liar.peer_id) and not alone.trust.is_banned(liar.peer_id)
