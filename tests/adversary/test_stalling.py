"""Members that keep the others waiting: what it costs a group once, and that it costs the next one nothing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from swarmcli.averaging import RoundResult
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.round.messages import CopyHeader, CopyHeld, CopyRequest, CopyTable, at_most
from swarmcli.averaging.round.service import AllreduceService
from swarmcli.compression import NoCompression
from swarmcli.network import PeerID, Stream
from tests.adversary.company import liar_of, round_beside
from tests.adversary.lies import LIES
from tests.adversary.lies.parts import keep_averages_from
from tests.averaging.averagers import Averagers, all_outcomes
from tests.averaging.rounds import Kind, Swarm
from tests.simulation import now, simulated
from tests.suites import soak

ROUND_TIME = 60.0
OPTIONS = AllreduceOptions(part_size_bytes=4 << 10, allreduce_timeout=ROUND_TIME)


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

        began, results = now(), await round_beside(honest, dishonest)
        assert liar.told and now() - began < at_most
        assert len({result.group.group_id for result in results}) == 1
        # What had arrived before it was left out counts, by its share.
        left_out = [dishonest.peer_id in result.left_out or dishonest.peer_id not in result.group for result in results]
        assert all(left_out) or "reducer" in name
        if all(dishonest.peer_id not in result.group for result in results):
            return  # it reduced, so that round failed: this was the next group
        assert all(peer.core.trust.has_no_seat(dishonest.peer_id) for peer in honest)

        began, results = now(), await round_beside(honest, dishonest)
        assert all(dishonest.peer_id not in result.group for result in results)
        assert now() - began < 2.0


def trickle_copies(service: AllreduceService, pause: float) -> list[PeerID]:
    """A holder that pauses before each average. Returns who has asked it, as that happens."""
    asked = list[PeerID]()

    async def give(peer: PeerID, request: CopyRequest, stream: Stream) -> None:
        asked.append(peer)
        holdings = (service._exchanges.get(request.group_id) or SimpleNamespace(holdings=None)).holdings
        holdings = holdings or service._kept[request.group_id]
        await stream.send(CopyTable(holdings.signed.told), holdings.tables)
        _, held = await stream.receive(CopyHeld, at_most(1 << 20))
        for part in holdings.unlike(bytes(held)):
            content = NoCompression().compress(holdings.results.part(part)).payload
            await asyncio.sleep(pause)
            await stream.send(CopyHeader(holdings.get(part).senders, holdings.get(part).weights), content)

    service.endpoint.withdraw(service.method("copy"))
    service.endpoint.serve_stream(service.method("copy"), CopyRequest, give)
    return asked


@pytest.mark.parametrize("pause", [4.0, 1e6])
@simulated
async def test_a_member_that_lacks_averages_is_not_kept_from_them_by_one_that_lets_it_wait(pause: float) -> None:
    """One liar gives it no averages, and another one, which it asks first, hardly any copies."""
    options = AllreduceOptions(part_size_bytes=64, allreduce_timeout=20.0)
    async with Swarm([Kind() for _ in range(7)], options=options) as swarm:
        keep_averages_from(0, swarm.peers[1].service)
        asked = trickle_copies(swarm.peers[2].service, pause)
        began = now()

        async def end() -> None:
            await asyncio.wait({swarm.tasks[0]})
            assert asked == [swarm.peers[0].peer_id] and now() - began < 20
            swarm.tasks[1].cancel()

        outcomes = await swarm.round(end)
        assert all(isinstance(outcome, RoundResult) for outcome in outcomes[2:] + outcomes[:1]), outcomes
