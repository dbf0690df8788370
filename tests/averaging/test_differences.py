"""A lossy codec in an averager of one's own erases no small change: differences from the last average travel."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarmcli import DHT, DecentralizedAverager
from swarmcli.averaging import RoundResult
from swarmcli.averaging.differences import ROOM_TO_TELL, DifferenceTold
from swarmcli.compression import BlockwiseQuantization, CompressionBase, Float16Compression, Uniform8BitQuantization
from swarmcli.errors import SwarmError
from swarmcli.network import wire
from tests.averaging.averagers import FAST, Averagers, Peer, all_outcomes, all_results
from tests.fuzz.values import YEAR_10000
from tests.optim.optim_swarm import until
from tests.simulation import within
from tests.suites import soak

CHANGE = 1e-4  # an eighth of what float16 tells apart between 1 and 2
SIZE = 1 << 12
CODECS: list[CompressionBase] = [Float16Compression(), Uniform8BitQuantization(), BlockwiseQuantization()]
# What averages of values are off by, of numbers between 1 and 2: once on the way in, once on the way back.
PRECISION = dict(zip((codec.name for codec in CODECS), (2 * 2**-11, 2 / 510, 2 * 2 / 127), strict=True))
FIRST_CODEC = pytest.mark.parametrize("codec", [CODECS[0], *soak(CODECS[1:])], ids=lambda codec: codec.name)


async def add(swarm: Averagers, count: int, codec: CompressionBase = CODECS[0], **config: Any) -> list[Peer]:
    """Peers whose tensors are unlike, of numbers from 1 to 2."""
    allreduce = replace(FAST, compression=codec)
    peers = []
    for _ in range(count):
        tensor = 1 + torch.rand(SIZE, generator=torch.Generator().manual_seed(len(swarm.peers)))
        peers.append(await swarm.add_one(tensors=[tensor], by_differences=True, allreduce=allreduce, **config))
    return peers


def held(peer: Peer) -> torch.Tensor:
    return peer.core._tensors[0]


def mean(peers: Sequence[Peer]) -> torch.Tensor:
    return torch.stack([held(peer) for peer in peers]).double().mean(0)


def away(peers: Sequence[Peer], expected: torch.Tensor) -> float:
    """How far any of them is from that, at most."""
    return max(float((held(peer).double() - expected).abs().max()) for peer in peers)


async def average(peers: Sequence[Peer], **request: Any) -> list[RoundResult]:
    return await all_results([peer.begin(**request) for peer in peers])


async def settle(peers: Sequence[Peer]) -> None:
    """After two rounds they hold the same average, and what the codec took of it in the first has been brought in."""
    for _ in range(2):
        await average(peers)


def sent(results: Sequence[RoundResult]) -> float:
    """Bytes per element that whoever sent most has sent."""
    return max(result.bytes_sent for result in results) / SIZE


@pytest.mark.parametrize(
    ("codec", "alike"),
    [
        (CODECS[0], True),
        (CODECS[1], False),
        (CODECS[2], False),
        *soak([(CODECS[0], False), (CODECS[1], True), (CODECS[2], True)]),
    ],
)
@within(3600)
async def test_small_changes_arrive(codec: CompressionBase, alike: bool) -> None:
    async with Averagers(1) as swarm:
        peers = await add(swarm, 2, codec)
        if alike:
            held(peers[1]).copy_(held(peers[0]))
        began, change = mean(peers), CHANGE * (1 + torch.rand(SIZE)) / 2
        for number in range(8):
            for place, peer in enumerate(peers):
                held(peer).add_(change if alike else 2 * change * place)
            expected = mean(peers) if number > 1 else began + (number + 1) * change
            assert sent(await average(peers)) < 3  # of two peers each sends a vector once; of float32 it has 4 bytes
            assert torch.equal(held(peers[0]), held(peers[1]))
            assert away(peers, expected) < (0.03 * CHANGE if number > 1 else PRECISION[codec.name])
        if alike and codec is CODECS[0]:  # their mean was not rounded a second time on its way back
            assert away(peers, began + 8 * change) < 0.03 * CHANGE


@FIRST_CODEC
@within(3600)
async def test_an_average_is_exact_where_members_have_no_common_one(codec: CompressionBase) -> None:
    async with Averagers(2) as swarm:
        peers = await add(swarm, 3, codec)
        expected = mean(peers)
        assert sent(await average(peers)) < 4
        assert away(peers, expected) < PRECISION[codec.name]
        missed, here = peers[0], peers[1:]
        held(here[0]).add_(CHANGE)
        await average(here)
        expected = mean(peers)
        assert missed.values != here[0].values
        assert sent(await average(peers)) > 4
        peers += await add(swarm, 1, codec)
        expected = mean(peers)
        await average(peers)
        assert away(peers, expected) < 1e-6
        held(peers[3]).add_(CHANGE)
        expected = mean(peers)
        assert sent(await average(peers)) < 4
        assert away(peers, expected) < 0.03 * CHANGE


@FIRST_CODEC
@within(3600)
async def test_other_tensors_are_averaged_to_the_precision_of_values(codec: CompressionBase) -> None:
    async with Averagers(3) as swarm:
        peers = await add(swarm, 2, codec)
        await average(peers)
        for size in (1e-3, 1e3, 1e-3):
            for peer in peers:
                held(peer).copy_(size * torch.randn(SIZE))
            largest = max(float(held(peer).abs().max()) for peer in peers)
            expected = mean(peers)
            assert sent(await average(peers)) < 3
            assert away(peers, expected) < 2 * PRECISION[codec.name] * largest
            assert torch.equal(held(peers[0]), held(peers[1]))


@within(3600)
async def test_alpha_weights_clients_and_auxiliaries() -> None:
    async with Averagers(4) as swarm:
        slow, *quick = (
            await add(swarm, 1, averaging_alpha=0.5) + await add(swarm, 1) + await add(swarm, 1, listening=False)
        )
        (helper,) = await add(swarm, 1, auxiliary=True)
        followers = await add(swarm, 1)
        at_helper = held(helper).clone()
        members = [slow, *quick]
        weights, peers = [1.0, 6.0, 1.0, 1.0, 0.0], [*members, helper, *followers]
        for _ in range(2):
            await all_results([peer.begin(weight=w) for peer, w in zip(peers, weights, strict=True)])
        for _ in range(3):
            for number, peer in enumerate(members):
                held(peer).add_(CHANGE * number)
            before, expected = held(slow).double().clone(), (mean(members) * 3 + 5 * held(quick[0]).double()) / 8
            await all_results([peer.begin(weight=w) for peer, w in zip(peers, weights, strict=True)])
            assert away([*quick, *followers], expected) < 1e-3 * 0.5
            assert away([slow], (before + expected) / 2) < 1e-3 * 0.5
            assert torch.equal(held(quick[0]), held(quick[1])) and torch.equal(held(quick[0]), held(followers[0]))
        assert torch.equal(held(helper), at_helper)


@within(3600)
async def test_a_failed_round_leaves_the_last_average_as_it_was() -> None:
    async with Averagers(5) as swarm:
        peers = await add(swarm, 2)
        await settle(peers)
        (outcome,) = await all_outcomes([peers[0].begin(timeout=1.0, allow_retries=False)])
        assert isinstance(outcome, SwarmError)
        held(peers[0]).add_(CHANGE)
        expected = mean(peers)
        assert sent(await average(peers)) < 3
        assert away(peers, expected) < 0.03 * CHANGE


@within(3600)
async def test_rounds_that_overlap() -> None:
    async with Averagers(6) as swarm:
        peers = await add(swarm, 2)
        await settle(peers)
        held(peers[0]).add_(CHANGE)
        expected = mean(peers)
        controls = [[peer.begin() for _ in range(3)] for peer in peers]
        await all_results([control for of_one in controls for control in of_one])
        assert away(peers, expected) < 0.03 * CHANGE
        held(peers[0]).add_(CHANGE)
        expected = mean(peers)
        await average(peers)
        assert away(peers, expected) < 0.03 * CHANGE
        assert torch.equal(held(peers[0]), held(peers[1]))


@pytest.mark.parametrize("seed", range(3))
@within(3600)
async def test_a_member_that_was_frozen_gets_the_differences_from_what_others_keep(seed: int) -> None:
    async with Averagers(seed) as swarm:
        peers = [*await add(swarm, 4), *await add(swarm, 1, bandwidth=0.0)]
        await average(peers)
        for number, peer in enumerate(peers):
            held(peer).add_(CHANGE * number)
        controls = [peer.begin(require_trigger=True, allow_retries=False) for peer in peers]
        await until(lambda: all(control.begun.done() for control in controls))
        frozen = peers[-1]
        for control in controls:
            control.allow_allreduce()
        swarm.network.freeze(frozen.peer_id)
        await all_outcomes([control for peer, control in zip(peers, controls, strict=True) if peer is not frozen])
        await asyncio.sleep(2)
        swarm.network.thaw(frozen.peer_id)
        late = await controls[peers.index(frozen)]
        assert late.late and all(torch.equal(held(peer), held(peers[0])) for peer in peers)
        references = [peer.core._reference for peer in peers]
        assert len({reference and reference.round_id for reference in references}) == 1
        assert all(reference and torch.equal(reference.tensors[0], held(peers[0])) for reference in references)


HOSTILE = [YEAR_10000, wire.encode(DifferenceTold(bytes(32), True))]


@pytest.mark.parametrize("said", HOSTILE)
@within(3600)
async def test_a_member_that_tells_nonsense_costs_bytes_and_nothing_else(said: bytes, monkeypatch: Any) -> None:
    async with Averagers(8) as swarm:
        peers = await add(swarm, 4)
        await settle(peers)

        async def told(*_: object) -> bytes:
            return said

        liar = peers[3]
        monkeypatch.setattr(liar.core, "_told", told)
        for number, peer in enumerate(peers):
            held(peer).add_(CHANGE * number)
        expected = mean(peers)
        results = await average(peers, gather="words")
        assert sent(results) > 4 and away(peers, expected) < 1e-6
        assert [results[0][peer.peer_id] for peer in peers[:3]] == ["words"] * 3


@within(3600)
async def test_one_member_alone_cannot_have_values_rounded(monkeypatch: Any) -> None:
    async with Averagers(9) as swarm:
        peers = await add(swarm, 4)
        await settle(peers)

        async def told(*_: object) -> bytes:
            assert peers[3].core._reference is not None
            return wire.encode(DifferenceTold(peers[3].core._reference.round_id, False))

        monkeypatch.setattr(peers[3].core, "_told", told)
        for number, peer in enumerate(peers):
            held(peer).add_(CHANGE * number)
        expected = mean(peers)
        await average(peers)
        assert away(peers, expected) < 0.03 * 3 * CHANGE


@within(3600)
async def test_gathered_data_and_averagers_of_values_are_kept_apart() -> None:
    async with Averagers(10) as swarm:
        peers = await add(swarm, 2)
        for _ in range(2):
            results = await average(peers, gather={"a": 1})
            assert all(set(map(repr, result.values())) == {"{'a': 1}"} for result in results)
        with pytest.raises(ValueError, match="gather has"):
            peers[0].begin(gather=b"x" * (16 << 10))
        await average(peers, gather=b"x" * ((16 << 10) - ROOM_TO_TELL - 3))
        other = await swarm.add_one(tensors=[torch.ones(SIZE)], allreduce=replace(FAST, compression=CODECS[0]))
        outcomes = await all_outcomes([peer.begin(timeout=20) for peer in [*peers, other]])
        assert isinstance(outcomes[2], SwarmError) and all(len(each) == 2 for each in outcomes[:2])


def test_small_steps_of_two_peers_over_tcp() -> None:
    """As a script of hivemind's users has it."""
    tensors = [torch.ones(1000), torch.ones(1000)]
    options: dict[str, Any] = {"start": True, "prefix": "small", "compression": Float16Compression()}
    with (
        DHT(start=True, host="127.0.0.1") as first,
        DHT(first.get_visible_addresses(), start=True, host="127.0.0.1") as second,
        DecentralizedAverager([tensors[0]], first, **options) as one,
        DecentralizedAverager([tensors[1]], second, **options) as two,
    ):
        for _ in range(6):
            for averager in (one, two):
                with averager.get_tensors() as (tensor,):
                    tensor += CHANGE
            control = one.step(wait=False)
            assert two.step() is not None and control.result() is not None
    assert torch.equal(*tensors)
    torch.testing.assert_close(tensors[0], torch.full((1000,), 1.0006), rtol=0, atol=1e-6)
