"""Evidence bans; without evidence nobody is banned, and nobody fills the memory of the others."""

from __future__ import annotations

import asyncio

import torch

from swarmcli.averaging.bans import MAX_BANS, MAX_TOLD_BY_ONE, BanNews, Bans, ToldEvidence, TwoGroups, UnlikeAverages
from swarmcli.averaging.config import AveragerConfig
from swarmcli.averaging.consensus.messages import AVERAGES, SignedAverages
from swarmcli.averaging.core import AveragerCore
from swarmcli.compression import NoCompression
from swarmcli.errors import CallRefused
from swarmcli.events import PeerBanned
from swarmcli.journal.describe import describe
from swarmcli.network import wire
from swarmcli.network.identity import Identity
from swarmcli.optim.state.averaging import state_config
from tests.averaging.averagers import Averagers, all_results, assert_one_group
from tests.simulation import simulated

GROUP_ID = bytes(32)


def signed(liar: Identity, root: bytes, prefix: str = "test") -> SignedAverages:
    return SignedAverages(root, liar.sign(AVERAGES, prefix.encode(), GROUP_ID, root))


def evidence_against(liar: Identity) -> UnlikeAverages:
    first, second = signed(liar, b"a" * 32), signed(liar, b"b" * 32)
    return UnlikeAverages(liar.peer_id, "test", GROUP_ID, first, second)


def test_two_signatures_under_unlike_averages_are_evidence_and_everything_else_is_none() -> None:
    liar, other = Identity.from_seed(1), Identity.from_seed(2)
    a, b = signed(liar, b"a" * 32), signed(liar, b"b" * 32)
    assert UnlikeAverages(liar.peer_id, "test", GROUP_ID, a, b).verify()
    assert not UnlikeAverages(liar.peer_id, "test", GROUP_ID, a, a).verify()
    assert not UnlikeAverages(other.peer_id, "test", GROUP_ID, a, b).verify()
    assert not UnlikeAverages(liar.peer_id, "test", b"1" * 32, a, b).verify()
    # An honest reducer may have both in two averagers to which a liar gave one group.
    assert not UnlikeAverages(liar.peer_id, "test", GROUP_ID, a, signed(liar, b"b" * 32, "another")).verify()


def test_two_groups_that_a_leader_signed_in_one_search_are_evidence_and_everything_else_is_none() -> None:
    leader, other = Identity.from_seed(1), Identity.from_seed(2)
    groups = b"a" * 32, b"b" * 32
    first, second = (leader.sign("list", b"search", group_id) for group_id in groups)
    later = leader.sign("list", b"a later search", groups[1])
    assert TwoGroups(leader.peer_id, b"search", groups, (first, second)).verify()
    assert not TwoGroups(leader.peer_id, b"search", groups, (first, later)).verify()
    assert not TwoGroups(leader.peer_id, b"search", (groups[0], groups[0]), (first, first)).verify()
    assert not TwoGroups(other.peer_id, b"search", groups, (first, second)).verify()


def test_a_ban_is_told_once_and_only_of_what_is_proved() -> None:
    events = list[object]()
    bans, liar = Bans(events.append), Identity.from_seed(1)
    right = evidence_against(liar)
    assert not bans.add(UnlikeAverages(liar.peer_id, "test", GROUP_ID, right.first, right.first))
    assert not bans.is_banned(liar.peer_id)
    assert bans.add(right) and bans.add(right)
    assert bans.is_banned(liar.peer_id)
    assert events == [PeerBanned(liar.peer_id.text, right.words())]


def test_a_peer_that_tells_of_endless_throwaway_identities_drives_nobody_elses_word_out() -> None:
    bans, honest, liar = Bans(), Identity.from_seed("honest").peer_id, Identity.from_seed("liar").peer_id
    culprits = [Identity.from_seed(number).peer_id for number in range(MAX_TOLD_BY_ONE + 10)]
    told = evidence_against(Identity.from_seed("x"))

    def against(culprit: bytes) -> UnlikeAverages:
        return UnlikeAverages(culprit, "test", GROUP_ID, told.first, told.second)  # type: ignore[arg-type]

    bans.take(against(culprits[0]), honest)
    for culprit in culprits[1:]:
        bans.take(against(culprit), liar)
    assert bans.is_banned(culprits[0]) and len(bans) == 1 + MAX_TOLD_BY_ONE <= MAX_BANS


@simulated
async def test_peers_that_are_connected_and_those_that_come_later_learn_of_a_ban_and_form_groups_without_it() -> None:
    async with Averagers(3) as swarm:
        peers = await swarm.add(4)
        liar = peers[3]
        assert peers[0].core.bans.add(evidence_against(Identity.from_seed(b"3/3")))
        await asyncio.sleep(5)
        assert all(peer.core.bans.is_banned(liar.peer_id) for peer in peers[:3])
        late = await swarm.add_one()
        await asyncio.sleep(5)
        assert late.core.bans.is_banned(liar.peer_id)  # from the peers that it met
        honest = [*peers[:3], late]
        controls = [peer.begin(timeout=30.0) for peer in honest]
        lonely = liar.begin(timeout=20.0, allow_retries=False)
        assert_one_group(await all_results(controls), honest)
        assert (await asyncio.gather(lonely, return_exceptions=True))[0] is not None
        assert liar.peer_id not in {member.peer_id for control in controls for member in control.group.members}


@simulated
async def test_an_accusation_without_proof_is_refused_and_its_teller_not_heard_again() -> None:
    async with Averagers(4) as swarm:
        honest, liar, victim = await swarm.add(3)
        good = evidence_against(Identity.from_seed(b"someone"))
        false = UnlikeAverages(victim.peer_id, "test", GROUP_ID, good.first, good.second)
        for told in (false, good):
            method = BanNews.of(honest.node, "test").method
            try:
                await liar.endpoint.connect(honest.endpoint.addresses[0], timeout=5)
                await liar.endpoint.call(
                    honest.peer_id, method, ToldEvidence((wire.encode(told),)), ToldEvidence, timeout=5
                )
            except CallRefused as error:
                assert error.code in ("false evidence", "not believed")
            else:
                raise AssertionError("it was believed")
        assert len(honest.core.bans) == 0


@simulated
async def test_all_averagers_of_a_run_at_one_peer_share_their_bans() -> None:
    async with Averagers(5) as swarm:
        peer = await swarm.add_one(prefix="run_grads", run="run")
        config = state_config("run", peer.core.config, NoCompression())
        states = AveragerCore([torch.zeros(3)], peer.node, config)
        alone = AveragerCore([torch.zeros(3)], peer.node, AveragerConfig(prefix="run_states"))
        liar = Identity.from_seed(b"liar")
        assert peer.core.bans.add(evidence_against(liar))
        assert states.bans.is_banned(liar.peer_id) and not alone.bans.is_banned(liar.peer_id)


def test_a_ban_is_a_line_for_people() -> None:
    line = describe(PeerBanned("a" * 52, "it voted twice"))
    assert line is not None and line.level == "warning"
    assert line.text == "aaaaaaaaaa is banned from this run: it voted twice"


@simulated
async def test_who_was_cut_off_while_evidence_was_found_hears_of_it_with_the_next_connection() -> None:
    async with Averagers(6) as swarm:
        finder, other = await swarm.add(2)
        finder.endpoint.disconnect(other.peer_id, "for a test")
        while finder.endpoint.is_connected(other.peer_id):  # noqa: ASYNC110  # in virtual time
            await asyncio.sleep(0.01)
        liar = Identity.from_seed(b"someone")
        assert finder.core.bans.add(evidence_against(liar))
        await other.endpoint.connect(finder.endpoint.addresses[0], timeout=5)
        await asyncio.sleep(1)
        assert other.core.bans.is_banned(liar.peer_id)
