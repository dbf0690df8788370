"""Members that thaw after the commit apply it late, from what others hold in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from swarmcli.averaging import RoundResult
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.round.auditing import Audits
from swarmcli.averaging.round.pace import STALLED
from swarmcli.compression import TensorMessage
from swarmcli.errors import RoundUndecided
from tests.averaging.averagers import Averagers, all_outcomes
from tests.averaging.rounds import Kind, Outcome, Swarm
from tests.optim.optim_swarm import until
from tests.simulation import now, within


@pytest.mark.parametrize("thaws_after", [0.0, 60.0])
@within(2000)
async def test_a_frozen_member_thaws_after_the_commit(thaws_after: float) -> None:
    """After 20 s nobody holds the averages any more."""
    options = AllreduceOptions(part_size_bytes=512)
    async with Swarm([Kind(), Kind(weight=2), Kind(bandwidth=0)], bandwidth=20_000.0, options=options) as swarm:

        async def freeze() -> None:
            await asyncio.sleep(0.4)
            swarm.freeze(2)
            await asyncio.wait(swarm.tasks[:2])
            await asyncio.sleep(thaws_after)
            swarm.network.thaw(swarm.peers[2].peer_id)

        outcomes = await swarm.round(freeze)
        swarm.check(outcomes)
        check_late(outcomes[2], late=not thaws_after)
        assert not any(outcome.late for outcome in outcomes[:2] if isinstance(outcome, RoundResult))


def check_late(outcome: Outcome | None, late: bool) -> None:
    if late:
        assert isinstance(outcome, RoundResult) and outcome.late
    else:
        assert isinstance(outcome, RoundUndecided)


@within(2000)
async def test_a_member_that_still_audits_when_the_result_is_committed_takes_the_averages_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receive = Audits._receive_input

    async def slowly(audits: Audits, *what: Any) -> TensorMessage:
        if audits._mates.me == 2:
            await asyncio.sleep(25)  # its line is slow
        return await receive(audits, *what)

    monkeypatch.setattr(Audits, "_receive_input", slowly)

    async with Swarm([Kind()] * 3, options=AllreduceOptions(part_size_bytes=512, audit=1.0)) as swarm:
        began = now()
        outcomes = await swarm.round()
        assert now() - began < 2 * STALLED + 1
        assert len(swarm.check(outcomes)) == 3
        assert not any(outcome.late for outcome in outcomes if isinstance(outcome, RoundResult))


@within(2000)
async def test_copies_from_links_that_are_too_slow_are_waited_for_no_longer_than_a_round() -> None:
    """Each of the others gives a part now and then, so none is ever silent, and all of it would take many minutes."""
    options = AllreduceOptions(part_size_bytes=4 << 10, allreduce_timeout=30.0, trust="members")
    async with Averagers(5, latency=0.05) as swarm:
        peers = await swarm.add(3, allreduce=options, shapes=((400, 200),))
        peers += await swarm.add(1, allreduce=options, shapes=((400, 200),), bandwidth=0.0)
        await asyncio.gather(*(peer.begin() for peer in peers))
        *others, late = peers
        controls = [peer.begin(allow_retries=False) for peer in peers]
        await until(lambda: controls[-1].began_allreduce)
        await asyncio.sleep(0.05)  # its parts have left
        swarm.network.freeze(late.peer_id)
        for control in controls[:-1]:
            assert (await control).contributors
        await asyncio.sleep(12)  # its connections have ended
        for peer in others:
            swarm.network.set_bandwidths(peer.peer_id, uplink=1000.0, downlink=None)
        swarm.network.thaw(late.peer_id)
        began = now()
        (outcome,) = await all_outcomes(controls[-1:])
        assert now() - began < 30 + 5
        assert isinstance(outcome, RoundUndecided), "it goes on as one that has missed the round"
