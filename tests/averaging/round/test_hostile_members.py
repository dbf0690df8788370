"""Members that break the protocol of a round: named, and without effect on the others or on what they average."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarmcli.averaging import RoundResult
from swarmcli.averaging.audit.signed import AVERAGES, SignedAverages, averages_root, digest_of
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.group import Group
from swarmcli.averaging.round.messages import (
    AverageHeader,
    Farewell,
    OpenExchange,
    PartHeader,
    RoundWord,
    SenderTerms,
)
from swarmcli.averaging.round.plan import Layout, Plan
from swarmcli.compression import NoCompression, TensorHeader
from swarmcli.compression.base import tensor_memory
from swarmcli.errors import CallRefused, NetworkError, RoundFailed, RoundUndecided
from swarmcli.events import PeerRefused
from swarmcli.network import Endpoint, Identity, PeerID, Stream
from tests.averaging import rounds
from tests.averaging.rounds import Kind, Peer
from tests.simulation import simulated


class Swarm(rounds.Swarm):
    """A swarm without audits: the scripts sign no inputs. `tests/adversary/test_audits.py` has those that do."""

    def __init__(self, kinds: Sequence[Kind], *, options: AllreduceOptions | None = None, **others: Any) -> None:
        super().__init__(kinds, options=replace(options or AllreduceOptions(part_size_bytes=1024), audit=0), **others)


Script = Callable[[Stream, Plan], Awaitable[None]]
Bye = Callable[[list[bytes]], Farewell]  # signs digests of averages
ReducerScript = Callable[[Stream, Plan, Bye], Awaitable[None]]


def plan_of(swarm: Swarm, group: Group) -> Plan:
    layout = Layout.of(swarm.peers[0].tensors)
    return Plan.make(layout, group.part_shares, swarm.options.part_size_bytes)


def hostile_sender(swarm: Swarm, script: Script) -> Callable[[Peer, Group], Awaitable[None]]:
    """A member that reduces nothing and opens its streams to the reducers for `script`, then rejects."""

    async def take_part(peer: Peer, group: Group) -> None:
        plan = plan_of(swarm, group)

        async def visit(reducer: PeerID) -> None:
            try:
                method = peer.service.method("exchange")
                async with peer.endpoint.stream(reducer, method, OpenExchange(group.group_id), timeout=10) as stream:
                    await script(stream, plan)
                    await stream.finish()
                    await asyncio.sleep(30)
            except NetworkError:
                pass

        async with asyncio.TaskGroup() as tasks:
            for reducer in plan.by_reducer:
                tasks.create_task(visit(group.members[reducer].peer_id))

    return take_part


def with_a_part(make: Callable[[int], torch.Tensor], weight: float = 1.0, codec: str = "none") -> Script:
    """A script that sends what `make` returns, given the number of elements, in place of the sender's first part."""

    async def script(stream: Stream, plan: Plan) -> None:
        await stream.send(SenderTerms(plan.fingerprint, weight))
        tensor = make(next(iter(plan.by_reducer.values()))[0].descriptor.numel)
        await stream.send(PartHeader(TensorHeader.of(codec, tensor)), tensor_memory(tensor))

    return script


def with_weight(weight: float) -> Script:
    async def script(stream: Stream, plan: Plan) -> None:
        await stream.send(SenderTerms(plan.fingerprint, weight))

    return script


async def garbage(stream: Stream, plan: Plan) -> None:
    await stream.send(RoundWord(bytes(32), "running"))


async def another_plan(stream: Stream, plan: Plan) -> None:
    await stream.send(SenderTerms(bytes(32), 1.0))


SENDERS = {
    "NaN": (with_a_part(lambda numel: torch.full((numel,), math.nan)), "holds NaN or infinity"),
    "negative weight": (with_weight(-1.0), "its weight is -1.0"),
    "no number": (with_weight(math.nan), "its weight is nan"),
    "a weight beyond all": (with_weight(1e19), "its weight is 1e"),
    "infinity": (
        with_a_part(lambda numel: torch.cat([torch.ones(numel - 1), torch.tensor([-math.inf])])),
        "holds NaN or infinity",
    ),
    "an overflow": (
        with_a_part(lambda numel: torch.full((numel,), 1e30), 1e18),
        r"values up to 1e\+30 with the weight 1e\+18",
    ),
    "parts of no weight": (with_a_part(torch.ones, 0.0), "more parts than the plan"),
    "another shape": (with_a_part(lambda _: torch.ones(3)), "another shape or type|bytes"),
    "another codec": (with_a_part(torch.ones, codec="uniform_8bit"), "cannot be decoded"),
    "a huge part": (with_a_part(lambda _: torch.ones(1 << 20)), "bytes"),
    "garbage": (garbage, "connection ended"),
    "another plan": (another_plan, "differ from the group's"),
    "too few parts": (with_weight(1.0), "finished"),
}


@pytest.mark.parametrize(("script", "words"), SENDERS.values(), ids=SENDERS.keys())
@simulated
async def test_a_hostile_sender_is_left_out_by_name(script: Script, words: str) -> None:
    async with Swarm([Kind(), Kind(), Kind(), Kind(bandwidth=0)]) as swarm:
        outcomes = await swarm.round(scripts={3: hostile_sender(swarm, script)})
        holders = swarm.check(outcomes)
        assert len(holders) == 3
        culprit = swarm.peers[3].peer_id
        for result in holders:
            assert culprit not in result.contributors
            assert result.left_out.keys() == {culprit}
        reasons = {result.left_out[culprit] for result in holders}
        refusals = {event.reason for event in swarm.events if isinstance(event, PeerRefused)}
        assert re.search(words, " ".join(reasons | refusals))


def hostile_reducer(swarm: Swarm, script: ReducerScript) -> Callable[[Peer, Group], Awaitable[None]]:
    """A member that answers the senders' streams with `script`, says that it takes part, and does nothing else."""

    async def take_part(peer: Peer, group: Group) -> None:
        plan = plan_of(swarm, group)

        async def exchange(sender: PeerID, request: OpenExchange, stream: Stream) -> None:
            await stream.receive(SenderTerms)
            await script(stream, plan, bye)

        def bye(digests: list[bytes]) -> Farewell:
            root = averages_root(b"".join(digests), b"")
            return Farewell(
                {}, SignedAverages(root, peer.endpoint.identity.sign(AVERAGES, b"test", group.group_id, root))
            )

        async def outcome(asker: PeerID, word: RoundWord) -> RoundWord:
            return RoundWord(word.group_id, "running")

        peer.service.close()
        peer.endpoint.serve_stream(peer.service.method("exchange"), OpenExchange, exchange)
        peer.endpoint.serve(peer.service.method("outcome"), RoundWord, outcome)
        await asyncio.sleep(200)

    return take_part


def average(plan: Plan, value: float = 1.0, **changes: Any) -> tuple[AverageHeader, memoryview]:
    part = plan.by_reducer[2][0]
    tensor = torch.full((part.descriptor.numel,), value)
    fields = {
        "tensor": TensorHeader.of("none", tensor),
        "senders": (0, 1),
        "weights": (1.0, 1.0),
    }
    return AverageHeader(**{**fields, **changes}), tensor_memory(tensor)


def sends(*messages: Callable[[Plan], tuple[Any, Any]]) -> ReducerScript:
    async def script(stream: Stream, plan: Plan, bye: Bye) -> None:
        for message in messages:
            await stream.send(*message(plan))
        await stream.finish()

    return script


async def nan_averages(stream: Stream, plan: Plan, bye: Bye) -> None:
    for part in plan.by_reducer[2]:
        tensor = torch.full((part.descriptor.numel,), math.nan)
        header = AverageHeader(TensorHeader.of("none", tensor), (0, 1), (1.0, 1.0))
        await stream.send(header, tensor_memory(tensor))
    await stream.send(bye([]))


async def nothing_arrived(stream: Stream, plan: Plan, bye: Bye) -> None:
    for _ in plan.by_reducer[2]:
        await stream.send(AverageHeader(None, (), ()))
    await stream.send(bye([digest_of(part.index, (), (), None) for part in plan.by_reducer[2]]))


async def one_face_signed_and_another_shown(stream: Stream, plan: Plan, bye: Bye) -> None:
    await stream.send(bye(await send_averages(stream, plan, 1.0, signed=2.0)))


async def unsigned(stream: Stream, plan: Plan, bye: Bye) -> None:
    await send_averages(stream, plan, 1.0)
    await stream.send(Farewell({}, SignedAverages(bytes(32), bytes(64))))


async def send_averages(
    stream: Stream, plan: Plan, value: float, signed: float | None = None, senders: tuple[int, ...] = (0, 1)
) -> list[bytes]:
    """Averages full of a value; returns digests of such averages, or of those full of `signed`."""
    weights = (1.0,) * len(senders)
    digests = []
    for part in plan.by_reducer[2]:
        tensor = torch.full((part.descriptor.numel,), value)
        await stream.send(AverageHeader(TensorHeader.of("none", tensor), senders, weights), tensor_memory(tensor))
        tensor = torch.full((part.descriptor.numel,), value if signed is None else signed)
        digests.append(digest_of(part.index, senders, weights, NoCompression().compress(tensor)))
    return digests


async def silence(stream: Stream, plan: Plan, bye: Bye) -> None:
    await asyncio.sleep(1000)


async def refusal(stream: Stream, plan: Plan, bye: Bye) -> None:
    raise CallRefused("full", "no room")


REDUCERS = {
    "NaN": (nan_averages, "NaN or infinity"),
    "strangers": (sends(lambda plan: average(plan, senders=(0, 7))), "no tensors in this group"),
    "senders twice": (sends(lambda plan: average(plan, senders=(0, 0))), "no tensors in this group"),
    "weights missing": (sends(lambda plan: average(plan, weights=(1.0,))), "does not fit the senders"),
    "negative weights": (sends(lambda plan: average(plan, weights=(1.0, -1.0))), "impossible weights"),
    "no senders but a payload": (sends(lambda plan: average(plan, senders=(), weights=())), "does not fit"),
    "a payload without a tensor": (sends(lambda plan: average(plan, tensor=None)), "bytes"),
    "half an average": (sends(lambda plan: (average(plan)[0], average(plan)[1][:8])), "cannot be decoded"),
    "too much": (sends(lambda plan: (average(plan)[0], bytes(1 << 20))), "bytes"),
    "an early end": (sends(), "gave no averages: the other end has finished"),
    "a refusal": (refusal, "refused: no room"),
    "one face signed and another one shown": (
        one_face_signed_and_another_shown,
        "broke the protocol: it has not signed the averages",
    ),
    "unsigned": (unsigned, "not signed the averages"),
    "nobody's tensors": (nothing_arrived, "nobody's tensors arrived"),
    "silence": (silence, "fell silent|did not begin"),
}


@pytest.mark.parametrize(("script", "words"), REDUCERS.values(), ids=REDUCERS.keys())
@simulated
async def test_a_hostile_reducer_fails_the_round_and_is_named(script: ReducerScript, words: str) -> None:
    options = AllreduceOptions(part_size_bytes=1024, reducer_timeout=30)
    async with Swarm([Kind(), Kind(), Kind(weight=0), Kind(auxiliary=True)], options=options) as swarm:
        outcomes = await swarm.round(scripts={2: hostile_reducer(swarm, script)})
        assert swarm.check(outcomes) == []
        for outcome in outcomes[:2]:
            assert isinstance(outcome, RoundFailed) and re.search(words, str(outcome)), outcome
            assert outcome.suspects == (swarm.peers[2].peer_id,)


@simulated
async def test_who_was_given_other_averages_and_gets_no_copies_applies_nothing() -> None:
    """The others commit theirs; its own are whole, and signed by all reducers."""
    options = AllreduceOptions(part_size_bytes=1024, sender_timeout=2)
    async with Swarm([Kind(), Kind(), Kind(weight=0), *[Kind()] * 4], options=options) as swarm:
        odd = swarm.peers[1].peer_id
        for peer in swarm.peers:
            peer.endpoint.withdraw(peer.service.method("copy"))

        async def two_faces(stream: Stream, plan: Plan, bye: Bye) -> None:
            value, senders = 2.0 if stream.peer == odd else 1.0, (0, 1, 3, 4, 5, 6)
            await stream.send(bye(await send_averages(stream, plan, value, senders=senders)))

        outcomes = await swarm.round(scripts={2: hostile_reducer(swarm, two_faces)})
        assert isinstance(outcomes[1], RoundUndecided)
        results = [outcome for outcome in outcomes if isinstance(outcome, RoundResult)]
        assert len(results) == 5 and len({result.digest for result in results}) == 1


@simulated
async def test_strangers_and_impostors_have_no_say() -> None:
    async with Swarm([Kind(), Kind(delay=5)]) as swarm:
        stranger = Endpoint(swarm.network.transport(Identity.from_seed(77), listening=False), client_mode=True)
        await stranger.start()
        leader = swarm.peers[0]
        stranger.learn(leader.endpoint.peer_id, leader.endpoint.addresses)

        async def refused(endpoint: Endpoint, method: str, request: Any, answer: Any, code: str) -> None:
            with pytest.raises(CallRefused) as caught:
                await endpoint.call(leader.peer_id, leader.service.method(method), request, answer, timeout=5)
            assert caught.value.code == code

        async def intrude() -> None:
            await asyncio.sleep(1)
            (group_id,) = leader.service._exchanges
            word = RoundWord(group_id, "running", seen=())
            await refused(stranger, "outcome", word, RoundWord, "stranger")
            member = swarm.peers[1].endpoint
            with pytest.raises(CallRefused, match="only members"):
                await open_stream(stranger, leader, OpenExchange(group_id))
            with pytest.raises(CallRefused, match="does not wait"):
                await open_stream(member, leader, OpenExchange(group_id, by_reducer=True))

        assert len(swarm.check(await swarm.round(intrude))) == 2
        await stranger.close()


async def open_stream(endpoint: Endpoint, to: Peer, request: OpenExchange) -> None:
    async with endpoint.stream(to.peer_id, to.service.method("exchange"), request, timeout=5) as stream:
        await stream.receive(Farewell)
