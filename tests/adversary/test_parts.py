"""Lies about what travels in a round: what each may achieve at most."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch

from swarmcli.averaging import RoundResult
from swarmcli.averaging.audit.signed import AVERAGES, SignedAverages, digest_of
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.round.buffers import root_of_tables
from swarmcli.averaging.round.messages import CopyHeader, CopyHeld, CopyRequest, CopyTable, at_most
from swarmcli.averaging.round.service import AllreduceService
from swarmcli.compression import TensorHeader, TensorMessage
from swarmcli.events import PeerBanned, PeerRefused
from swarmcli.network import Identity, PeerID, Stream
from tests.adversary.company import liar_of, round_beside
from tests.adversary.lies import LIES, parts
from tests.adversary.lies.parts import keep_averages_from
from tests.averaging.averagers import Averagers, Peer
from tests.averaging.rounds import Kind, Swarm
from tests.simulation import simulated
from tests.suites import soak

NAMES = [name for name, each in LIES.items() if each.tell.__module__ == parts.__name__]
# These lies change messages on their way, after they were signed for audits: they are to be found without them.
OPTIONS = AllreduceOptions(part_size_bytes=1024, sender_timeout=5.0, audit=0)


# What else holds: of the liar's id, what it told, and the results of the first round and of the second.
Check = Callable[[Peer, list[str], list[RoundResult], list[RoundResult]], None]


def is_in_no_group(liar: Peer, told: list[str], first: list[RoundResult], second: list[RoundResult]) -> None:
    assert all(liar.peer_id not in {member.peer_id for member in result.group.members} for result in second)


def has_the_share_of_one(liar: Peer, told: list[str], first: list[RoundResult], second: list[RoundResult]) -> None:
    assert {result.total_weight for result in first} == {12.0}, "three honest ones, and three times all of them"


def is_not_listened_to_again(liar: Peer, told: list[str], first: list[RoundResult], second: list[RoundResult]) -> None:
    assert any("nothing" in words for words in told) and any("before" in words for words in told)


CHECKS: dict[str, Check] = {
    "two signed lists": is_in_no_group,
    "weights without bound": has_the_share_of_one,
    "false accusations": is_not_listened_to_again,
}


@pytest.mark.parametrize("count", [4, *soak([5, 8])])
@pytest.mark.parametrize("name", NAMES)
@simulated
async def test_honest_peers_lose_no_round_and_ban_who_signs_two_lists_alone(name: str, count: int) -> None:
    async with Averagers(3) as swarm:
        *honest, last = await swarm.add(count, allreduce=OPTIONS, shapes=((40, 50), (300,)))
        liar = liar_of(last)
        LIES[name].tell(liar)
        results = [await round_beside(honest, last) for _ in range(2)]
        assert liar.told
        await asyncio.sleep(10)  # evidence gets around
        for peer in honest:
            banned = {event.peer for event in peer.events if isinstance(event, PeerBanned)}
            assert banned == ({last.peer_id.text} if name == "two signed lists" else set())
            assert peer.core.trust.is_banned(last.peer_id) == bool(banned)
        if name in CHECKS and count == 4:
            CHECKS[name](last, liar.told, *results)


def give_copies_of_nothing(service: AllreduceService, reducer: Identity, place: int) -> None:
    """A holder that gives out an average of this reducer with no content at all, for which the reducer has signed."""

    async def give(peer: PeerID, request: CopyRequest, stream: Stream) -> None:
        holdings = service._exchanges[request.group_id].holdings
        parts, signed = holdings.plan.by_reducer[place], holdings.signed
        assert signed is not None
        digests, inputs = holdings.tables
        average = holdings.get(parts[0])
        assert average is not None
        empty = TensorMessage(TensorHeader.of("none", torch.zeros(0)), ())
        false = digest_of(parts[0].index, average.senders, average.weights, empty)
        digests = digests[: 32 * parts[0].index] + false + digests[32 * (1 + parts[0].index) :]
        root = root_of_tables(parts, digests, inputs)
        told = SignedAverages(root, reducer.sign(AVERAGES, b"test", request.group_id, root))
        await stream.send(CopyTable({**signed.told, place: told}), (digests, inputs))
        await stream.receive(CopyHeld, at_most(1 << 20))
        await stream.send(CopyHeader(average.senders, average.weights))
        await stream.finish()

    service.endpoint.withdraw(service.method("copy"))
    service.endpoint.serve_stream(service.method("copy"), CopyRequest, give)


@simulated
async def test_a_copy_that_is_no_tensor_is_refused_and_the_next_holder_asked() -> None:
    options = AllreduceOptions(part_size_bytes=1024, sender_timeout=5.0, audit=0)
    async with Swarm([Kind() for _ in range(7)], options=options) as swarm:
        keep_averages_from(0, swarm.peers[1].service)
        give_copies_of_nothing(swarm.peers[2].service, swarm.peers[1].endpoint.identity, 1)
        outcomes = await swarm.round()
        assert all(isinstance(outcome, RoundResult) for outcome in outcomes), outcomes
        refusals = [event.peer for event in swarm.events if isinstance(event, PeerRefused) and event.what == "averages"]
        assert refusals == [swarm.peers[2].peer_id.text]
