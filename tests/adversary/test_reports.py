"""Reducers that refuse, and report that it was the others who failed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from swarmcli.averaging import AveragerCore
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.control import RoundResult
from swarmcli.dht import DHTNode
from swarmcli.errors import CallRefused
from swarmcli.network import PeerID
from tests.adversary.lies import Liar
from tests.adversary.lies.base import on_each_exchange
from tests.averaging.averagers import Averagers, all_outcomes
from tests.simulation import now, simulated
from tests.suites import soak

OPTIONS = AllreduceOptions(part_size_bytes=4 << 10, allreduce_timeout=60.0)
ROUNDS = 8


def refuse_and_blame(
    node: DHTNode, averager: AveragerCore | None, honest: Sequence[PeerID], *, refuses: bool = True
) -> Liar:
    """It reports that all honest members failed; what they would have it reduce it refuses, or not."""
    liar = Liar(random.Random(0), node.endpoint, node, averager)

    async def refuse(*_: Any) -> None:
        liar.told.append("refused")
        raise CallRefused("busy", "not now")

    def alter(round_: Any) -> None:
        report = round_.report
        named = tuple(sorted(round_.group.index_of(peer) for peer in honest if peer in round_.group))
        round_.report = lambda: msgspec.structs.replace(report(), failed=named)
        if refuses:
            round_.take_stream = refuse

    on_each_exchange(liar, alter)
    return liar


@pytest.mark.parametrize(
    ("count", "accomplices", "all_refuse"),
    [(4, 0, True), *soak((*sizes, both) for sizes in [(8, 1), (8, 0), (16, 0), (16, 4)] for both in (False, True))],
)
@simulated
async def test_who_refuses_costs_a_second_try_once_and_the_honest_go_on_reducing(
    count: int, accomplices: int, all_refuse: bool
) -> None:
    async with Averagers(5) as swarm:
        peers = await swarm.add(count, allreduce=OPTIONS, shapes=((200, 200), (40,)))
        await all_outcomes([peer.begin() for peer in peers])
        honest, hostile = peers[: -1 - accomplices], peers[-1 - accomplices :]
        names = [peer.peer_id for peer in honest]
        liars = [
            refuse_and_blame(peer.node, peer.core, names, refuses=all_refuse or peer is hostile[0]) for peer in hostile
        ]
        disturbed = 0
        for _ in range(ROUNDS):
            lied = [peer.begin(timeout=600) for peer in hostile]
            outcomes = await all_outcomes([peer.begin(timeout=600) for peer in honest])
            await all_outcomes(lied)
            results = [outcome for outcome in outcomes if isinstance(outcome, RoundResult)]
            assert len(results) == len(honest), outcomes
            disturbed += "tries" in results[0].remark and results[0].group.leader != hostile[0].peer_id
        assert liars[0].told and disturbed <= 1, "when it is found out"
        assert all(results[0].reduced[peer.peer_id] for peer in honest)
        assert not any(peer.core.trust.has_no_seat(other.peer_id) for peer in honest for other in honest)
        assert now() < 30
