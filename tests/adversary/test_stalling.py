"""Members that keep the others waiting: what it costs a group once, and that it costs the next one nothing."""

from __future__ import annotations

import pytest

from swarmcli.averaging import RoundResult
from swarmcli.averaging.config import AllreduceOptions
from tests.adversary.company import liar_of
from tests.adversary.lies import LIES, stalling
from tests.averaging.averagers import Averagers, Peer, all_outcomes
from tests.simulation import now, simulated
from tests.suites import soak

ROUND_TIME = 60.0
OPTIONS = AllreduceOptions(part_size_bytes=4 << 10, allreduce_timeout=ROUND_TIME)


async def honest_round(honest: list[Peer], dishonest: Peer) -> tuple[list[RoundResult], float]:
    """What a round gave to the honest, beside a peer that lies, and the seconds that it took them."""
    began, lied = now(), dishonest.begin(timeout=600)
    outcomes = await all_outcomes([peer.begin(timeout=600) for peer in honest])
    results = [outcome for outcome in outcomes if isinstance(outcome, RoundResult)]
    seconds = now() - began
    lied.cancel()
    assert len(results) == len(honest), outcomes
    assert len({result.group.group_id for result in results}) == 1
    assert len({tuple(peer.values) for peer in honest}) == 1
    return results, seconds


@pytest.mark.parametrize(
    ("name", "count", "at_most"),
    [
        ("trickling sender", 4, ROUND_TIME / 3 + 5),
        ("trickling reducer", 3, 2 * ROUND_TIME / 3 + 5),
        ("always about to begin", 3, ROUND_TIME / 2 + 15),
        *soak([("trickling sender", 3, ROUND_TIME / 3 + 5), ("trickling reducer", 4, 2 * ROUND_TIME / 3 + 5)]),
    ],
)
@simulated
async def test_who_keeps_others_waiting_is_left_out_and_has_no_seat_in_the_next_group(
    name: str, count: int, at_most: float
) -> None:
    async with Averagers(5) as swarm:
        *honest, dishonest = peers = await swarm.add(count, allreduce=OPTIONS, shapes=((200, 200), (40,)))
        await all_outcomes([peer.begin() for peer in peers])  # now they know each other
        liar = liar_of(dishonest)
        LIES[name].tell(liar)

        results, seconds = await honest_round(honest, dishonest)
        assert liar.told and seconds < at_most
        # What had arrived before it was left out counts, by its share.
        left_out = [dishonest.peer_id in result.left_out or dishonest.peer_id not in result.group for result in results]
        assert all(left_out) or "reducer" in name
        if all(dishonest.peer_id not in result.group for result in results):
            return  # it reduced, so that round failed: this was the next group
        assert all(peer.core.trust.has_no_seat(dishonest.peer_id) for peer in honest)

        results, seconds = await honest_round(honest, dishonest)
        assert all(dishonest.peer_id not in {m.peer_id for m in result.group.members} for result in results)
        assert seconds < 2.0


@simulated
async def test_a_leader_that_never_begins_holds_its_followers_for_one_search() -> None:
    async with Averagers(6) as swarm:
        first, *honest = peers = await swarm.add(4, allreduce=OPTIONS)
        await all_outcomes([peer.begin() for peer in peers])
        liar = liar_of(first)
        stalling.gather_and_never_begin(liar)
        _, seconds = await honest_round(honest, first)
        assert liar.told and seconds < 15
        assert all(peer.core.trust.has_no_seat(first.peer_id) for peer in honest)
