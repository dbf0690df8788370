"""What peers of whom nothing is expected can make an averager keep, compute and wait for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from swarmcli import concurrency
from swarmcli.averaging import RoundResult
from swarmcli.averaging.aggregators.centered_clip import CenteredClip
from swarmcli.averaging.aggregators.median import CollectedPart
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.group import MAX_MEMBERS, Group, Member
from swarmcli.averaging.round.messages import OpenExchange
from swarmcli.errors import NetworkError
from swarmcli.network import Identity, PeerID
from swarmcli.network.bounds import LONGEST_ROUND_TRIP
from swarmcli.network.control.channel import ControlChannel
from swarmcli.testing import MemoryNetwork
from tests.averaging.rounds import Kind, Swarm
from tests.network.worlds import endpoints
from tests.simulation import simulated


def invented(chance: random.Random, liar: PeerID, victim: PeerID, search: bytes = b"") -> Group:
    """A group of as many members as there may be, of whom there are two."""
    others = [Member(PeerID(chance.randbytes(32))) for _ in range(MAX_MEMBERS - 2)]
    members = [Member(liar), Member(victim, search=search), *others]
    return Group.form(b"", members, [1.0] * MAX_MEMBERS, chance.randbytes(16))


@simulated
async def test_a_leader_that_was_asked_has_its_groups_remembered_within_a_bound() -> None:
    """A leader may begin wrong groups again and again, such as ones that hold a banned member."""
    service = Swarm([Kind()]).peers[0].service
    service._closed = True  # it shows nobody anything
    chance = random.Random(2)
    liar, own = Identity.from_seed(9).peer_id, service.endpoint.peer_id
    for _ in range(24):
        service.decline(invented(chance, liar, own))
    assert sum(len(agreement.mates) for agreement in service._agreements.values()) <= 1 << 16


@simulated
async def test_calls_for_rounds_that_never_begin_are_not_woken_by_others() -> None:
    """Once, whatever began or ended woke all of them: thousands made rounds thirty times slower."""
    async with Swarm([Kind(), Kind(), Kind()]) as swarm:
        victim, *_, asker = swarm.peers

        async def early(number: int) -> None:
            with suppress(NetworkError):
                await victim.service._exchange(asker.peer_id, OpenExchange(bytes([1, number]) * 16), None)  # type: ignore[arg-type]

        calls = [asyncio.create_task(early(number)) for number in range(200)]
        await asyncio.sleep(1)
        bells = list(victim.service._beginning.values())
        assert len(bells) == len(calls)
        assert all(isinstance(outcome, RoundResult) for outcome in await swarm.round())
        assert all(not bell._event.is_set() for bell in bells) and not any(call.done() for call in calls)
        del bells
        await asyncio.sleep(130)
        await asyncio.gather(*calls)
        assert not victim.service._beginning, "nothing is kept of what nobody waits for"


@simulated
async def test_who_answers_pings_late_stretches_no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "Ten round trips" of a peer that holds its pongs back were a minute and a half."""
    waiting, late = (Identity.from_seed(seed).peer_id for seed in range(2))
    answer = ControlChannel._send_pong

    async def send_pong(channel: ControlChannel, number: int, received: float) -> None:
        if channel.peer_id == waiting:
            await asyncio.sleep(5)
            received = channel._context.clock.raw()  # it says that it took no time
        await answer(channel, number, received)

    monkeypatch.setattr(ControlChannel, "_send_pong", send_pong)
    async with endpoints(MemoryNetwork(), 2) as (one, other):
        await one.connect(other.addresses[0], timeout=5)
        await asyncio.sleep(8)
        assert (one.ping_time(late) or 0) > 4
        assert one.round_trip(late) == pytest.approx(LONGEST_ROUND_TRIP)


def test_long_arithmetic_leaves_the_loop_however_small_a_part_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipping takes many passes over all inputs, of which each may be far below what is worth another thread."""
    beside, seen = [False], list[bool]()

    async def offload(job: Callable[[], Any]) -> Any:
        beside[0] = True
        try:
            return job()
        finally:
            beside[0] = False

    finish = CollectedPart.finish

    def watched(part: CollectedPart) -> Any:
        seen.append(beside[0])
        return finish(part)

    monkeypatch.setattr(concurrency, "offload", offload)
    monkeypatch.setattr(CollectedPart, "finish", watched)

    @simulated
    async def main() -> None:
        options = AllreduceOptions(aggregator=CenteredClip(iterations=20), part_size_bytes=256 << 10)
        async with Swarm([Kind()] * 5, shapes=((40_000,),), options=options) as swarm:
            assert all(isinstance(outcome, RoundResult) for outcome in await swarm.round())

    main()
    assert seen and all(seen)
