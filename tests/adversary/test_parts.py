"""Lies about what travels in a round: what each may achieve at most."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.control import RoundResult
from swarmcli.events import PeerBanned
from swarmcli.testing import virtual_time
from tests.adversary.lies import LIES, Liar, parts
from tests.averaging.averagers import Averagers, Peer, all_outcomes
from tests.suites import soak

NAMES = [name for name, each in LIES.items() if each.tell.__module__ == parts.__name__]
# These lies change messages on their way, after they were signed for audits: they are to be found without them.
OPTIONS = AllreduceOptions(part_size_bytes=1024, sender_timeout=5.0, audit=0)


async def round_beside(swarm: Averagers, liar: Peer, **request: Any) -> list[RoundResult]:
    """What an honest round gives beside the liar. No honest peer loses it, and none has other bits than another."""
    honest = [peer for peer in swarm.peers if peer is not liar]
    lied = liar.begin(timeout=120, **request)
    outcomes = await all_outcomes([peer.begin(timeout=120) for peer in honest])
    lied.cancel()
    await asyncio.gather(lied, return_exceptions=True)
    results = [outcome for outcome in outcomes if isinstance(outcome, RoundResult)]
    assert len(results) == len(honest), outcomes
    assert len({tuple(peer.values) for peer in honest}) == 1
    return results


def beside(name: str, count: int, rounds: int, check: Any, seed: int = 3) -> None:
    async def main() -> None:
        async with Averagers(seed) as swarm:
            await swarm.add(count, allreduce=OPTIONS, shapes=((40, 50), (300,)))
            liar_peer = swarm.peers[-1]
            liar = Liar(random.Random(seed), liar_peer.endpoint, liar_peer.node, liar_peer.core)
            LIES[name].tell(liar)
            results = [await round_beside(swarm, liar_peer) for _ in range(rounds)]
            assert liar.told
            await asyncio.sleep(10)  # evidence gets around
            check(swarm, liar_peer, results, liar)

    virtual_time.run(main(), timeout=3600)


def banned(swarm: Averagers) -> set[str]:
    return {event.peer for peer in swarm.peers for event in peer.events if isinstance(event, PeerBanned)}


@pytest.mark.parametrize("count", [4, *soak([5, 8])])
@pytest.mark.parametrize("name", NAMES)
def test_honest_peers_lose_no_round_and_ban_no_honest_peer(name: str, count: int) -> None:
    def check(swarm: Averagers, liar: Peer, results: list[list[RoundResult]], told: Liar) -> None:
        assert banned(swarm) <= {liar.peer_id.text}

    beside(name, count, 2, check)


def test_two_signed_lists_ban_their_reducer_at_every_honest_peer() -> None:
    def check(swarm: Averagers, liar: Peer, results: list[list[RoundResult]], told: Liar) -> None:
        assert all(peer.core.bans.is_banned(liar.peer_id) for peer in swarm.peers if peer is not liar)
        assert all(liar.peer_id not in {m.peer_id for m in result.group.members} for result in results[-1])

    beside("two signed lists", 5, 2, check)


def test_who_would_overflow_a_sum_is_left_out_by_name() -> None:
    def check(swarm: Averagers, liar: Peer, results: list[list[RoundResult]], told: Liar) -> None:
        for result in results[-1]:
            assert "overflow" in result.left_out[liar.peer_id]

    beside("an overflow", 4, 1, check)


def test_a_weight_without_bound_gets_the_share_of_one() -> None:
    def check(swarm: Averagers, liar: Peer, results: list[list[RoundResult]], told: Liar) -> None:
        assert {result.total_weight for result in results[-1]} == {
            12.0
        }  # three honest ones, and three times all of them

    beside("weights without bound", 4, 1, check)


def test_one_false_digest_does_not_have_everything_sent_again() -> None:
    def check(swarm: Averagers, liar: Peer, results: list[list[RoundResult]], told: Liar) -> None:
        nbytes = 4 * (40 * 50 + 300)
        for result in results[-1]:
            assert "2 tries" in result.remark
            # 2 · 3/4 of the vector travel once; what the liar reduced, a quarter of it, once more; and no more.
            assert result.bytes_sent < 2.5 * nbytes

    beside("one false digest", 4, 1, check)


def test_who_accuses_without_proof_is_not_listened_to_again() -> None:
    def check(swarm: Averagers, liar: Peer, results: list[list[RoundResult]], told: Liar) -> None:
        assert not banned(swarm)
        assert any("nothing" in words for words in told.told) and any("before" in words for words in told.told)

    beside("false accusations", 4, 2, check)
