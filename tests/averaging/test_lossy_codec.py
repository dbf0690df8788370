"""A lossy codec in an averager of one's own loses no small change: differences from the last common average travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from swarmcli import DHT, DecentralizedAverager
from swarmcli.averaging import RoundResult
from swarmcli.averaging.round.differences import ROOM_TO_TELL
from swarmcli.compression import BlockwiseQuantization, CompressionBase, Float16Compression, Uniform8BitQuantization
from swarmcli.errors import RoundFailed, SwarmError
from tests.averaging.averagers import FAST, Averagers, Peer, all_outcomes, all_results
from tests.optim.optim_swarm import until
from tests.simulation import within

CHANGE = 1e-5  # of numbers between 1 and 2, where float16 tells 5e-4 apart and 8 bits some 4e-3
SIZE = 1 << 12
FLOAT16 = Float16Compression()


async def add(swarm: Averagers, count: int, codec: CompressionBase = FLOAT16, **config: Any) -> list[Peer]:
    """Peers whose tensors are unlike, of numbers from 1 to 2."""
    options, peers = {"by_differences": True, "allreduce": replace(FAST, compression=codec), **config}, []
    for _ in range(count):
        tensor = 1 + torch.rand(SIZE, generator=torch.Generator().manual_seed(len(swarm.peers)))
        peers.append(await swarm.add_one(tensors=[tensor], **options))
    return peers


def held(peer: Peer) -> torch.Tensor:
    return peer.core._tensors[0]


def change(peers: Sequence[Peer]) -> torch.Tensor:
    """Lets each peer learn something else; returns the mean of all."""
    for number, peer in enumerate(peers):
        held(peer).add_(CHANGE * (number + 1))
    return torch.stack([held(peer) for peer in peers]).double().mean(0)


async def average(peers: Sequence[Peer], **request: Any) -> list[RoundResult]:
    return await all_results([peer.begin(**request) for peer in peers])


def sent(results: Sequence[RoundResult]) -> float:
    """The bytes per element of the peer that sent most."""
    return max(result.bytes_sent for result in results) / SIZE


def agree(peers: Sequence[Peer], expected: torch.Tensor, within: float = 0.05 * CHANGE + 2**-23) -> None:
    """All hold the same bits, at most `within` from `expected`: a change's loss in the codec, and a rounding."""
    assert all(torch.equal(held(peer), held(peers[0])) for peer in peers)
    assert float((held(peers[0]).double() - expected).abs().max()) <= within


@pytest.mark.parametrize(
    ("codec", "bytes_of_one"), [(FLOAT16, 2), (Uniform8BitQuantization(), 1), (BlockwiseQuantization(), 1)]
)
@within(3600)
async def test_small_changes_arrive_and_members_hold_the_same_bits(codec: CompressionBase, bytes_of_one: int) -> None:
    async with Averagers(1) as swarm:
        peers = await add(swarm, 2, codec)
        for number in range(10):
            expected = change(peers)
            per_element = sent(await average(peers))  # of two peers each sends a vector once; of float32 it has 4 bytes
            assert per_element == 4 if number == 0 else bytes_of_one <= per_element < bytes_of_one + 0.9
            agree(peers, expected)


@within(3600)
async def test_where_members_have_no_common_average_a_round_is_exact_and_the_next_one_is_not() -> None:
    async with Averagers(2) as swarm:
        peers = await add(swarm, 2) + await add(swarm, 1, listening=False)
        (helper,) = await add(swarm, 1, auxiliary=True)
        at_helper = held(helper).clone()
        await average([*peers, helper])
        change(peers)
        await average(peers[:2])  # without the third, which has another average then
        for newcomers in (0, 1):
            peers += await add(swarm, newcomers)
            expected = change(peers)
            assert sent(await average([*peers, helper])) > 3
            agree(peers, expected)
        expected, at_follower = change(peers), held(peers[0]).double()
        expected = (4 * expected - at_follower) / 3  # it brings nothing
        followers = [peers[0].begin(weight=0.0)]
        assert sent(await all_results([*followers, *(peer.begin() for peer in [*peers[1:], helper])])) < 3
        agree(peers, expected)
        assert torch.equal(held(helper), at_helper)


@within(3600)
async def test_a_round_that_fails_leaves_the_reference() -> None:
    async with Averagers(3) as swarm:
        peers = await add(swarm, 2)
        await average(peers)
        (alone,) = await all_outcomes([peers[0].begin(timeout=1.0, allow_retries=False)])
        controls = [peer.begin(require_trigger=True, allow_retries=False, timeout=10.0) for peer in peers]
        await until(lambda: all(control.begun.done() for control in controls))
        controls[1].cancel()
        controls[0].allow_allreduce()
        (left,) = await all_outcomes([controls[0]])
        assert isinstance(alone, SwarmError) and isinstance(left, RoundFailed)
        expected = change(peers)
        assert sent(await average(peers)) < 3
        agree(peers, expected)


@within(3600)
async def test_rounds_that_overlap_refer_to_what_their_lists_say() -> None:
    async with Averagers(4) as swarm:
        peers = await add(swarm, 3)
        await average(peers)
        expected = change(peers)
        await all_results([peer.begin() for peer in peers for _ in range(3)])
        agree(peers, expected)
        expected = change(peers)
        assert sent(await average(peers)) < 4
        agree(peers, expected)


@pytest.mark.parametrize("said", [b"\x92\xc4\x20" + bytes(32) + b"\xc4\x00", b"\x92\xc4\x21" + bytes(33), b"\xc1"])
@within(3600)
async def test_a_member_that_tells_another_reference_costs_bytes(said: bytes, monkeypatch: Any) -> None:
    async with Averagers(6) as swarm:
        peers = await add(swarm, 4)
        await average(peers)
        search = peers[3].core.finder._new_search
        monkeypatch.setattr(peers[3].core.finder, "_new_search", lambda control, gathered: search(control, said))
        expected = change(peers)
        results = await average(peers, gather=["words"])
        assert sent(results) > 4
        agree(peers, expected)
        assert [results[0][peer.peer_id] for peer in peers[:3]] == [["words"]] * 3
        with pytest.raises(ValueError, match="gather has"):
            peers[0].begin(gather=msgspec.Raw(bytes((16 << 10) - ROOM_TO_TELL + 1)))


@within(3600)
async def test_what_is_restored_after_an_average_beyond_the_codec_is_averaged_again() -> None:
    async with Averagers(7) as swarm:
        peers = await add(swarm, 2)
        for value in (1e30, float("nan"), 1.0):
            for peer in peers:
                held(peer).fill_(value)
            await average(peers)
        agree(peers, torch.ones(SIZE))


def test_small_steps_of_two_peers_over_tcp() -> None:
    """The peers are set up as in a script written for hivemind."""
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
    torch.testing.assert_close(tensors[0], torch.full((1000,), 1 + 6 * CHANGE), rtol=0, atol=1e-6)
