"""States that are averaged volume by volume: the same result, less memory, and what one that fails leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from swarmcli.events import Noticed, RoundFinished
from swarmcli.optim.state.rounds import Occasion
from swarmcli.testing import virtual_time
from swarmcli.testing.memory_network import MemoryNetwork
from tests.optim.optim_swarm import record, until
from tests.optim.state.averaging_swarm import Peer, swarm
from tests.optim.state.volume_memory import VolumeMemory
from tests.suites import soak

SIZE = 13  # elements of float32 in the parameter; with the statistics 60 bytes
STATE = 60
VOLUMES = {4: 15, 12: 6, 24: 4, 52: 2, STATE: 1}  # bytes of one: how many there are


def scatter(peers: Sequence[Peer]) -> None:
    """Multiples of 1/64, so that sums of them are exact in whatever order they are made."""
    generator = torch.Generator().manual_seed(5)
    for peer in peers:
        for tensor in (peer.parameter.data, peer.statistics):
            tensor.copy_(torch.randint(-999, 999, tensor.shape, generator=generator) / 64)


async def averaged(volume_bytes: int, *, changes: bool, learn: float = 0.0) -> list[list[float]]:
    async with swarm(1.0, 2.0, 3.0, size=SIZE, volume_bytes=volume_bytes) as peers:
        scatter(peers)
        rounds = record(peers[0].node, RoundFinished)
        for number, peer in enumerate(peers):
            await peer.begin(peers, float(number + 1), changes=changes)
            peer.parameter.data[number : number + 3] += learn
        assert all([await peer.averaging.apply(wait=True) for peer in peers])
        assert [event.outcome for event in rounds] == ["committed"] * VOLUMES[volume_bytes]
        assert len({event.round_id for event in rounds}) == len(rounds)
        return [peer.values + peer.statistics.tolist() for peer in peers]


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("volume_bytes", [12, *soak({*VOLUMES} - {12})])
def test_many_volumes_give_what_one_gives_bit_for_bit(volume_bytes: int, changes: bool) -> None:
    async def main() -> None:
        learn = 1 / 3 if changes else 0.0
        values = await averaged(volume_bytes, changes=changes, learn=learn)
        assert values == await averaged(STATE, changes=changes, learn=learn)
        assert changes or values[0] == values[1] == values[2]

    virtual_time.run(main(), timeout=300)


LARGE = 1 << 18  # elements
VOLUME = 4 * LARGE // 8


@pytest.mark.parametrize("changes", [False, True])
def test_nobody_needs_memory_for_more_than_a_volume_and_it_is_given_back(
    changes: bool,
) -> None:
    async def main() -> None:
        async with swarm(1.0, 3.0, size=LARGE, volume_bytes=VOLUME) as peers:
            assert memory.now == 0
            for peer in peers:
                await peer.begin(peers, changes=changes)
            copies = 4 * LARGE if changes else 0  # of the moment, since the state may change
            while any(peer.averaging.passage is not None for peer in peers):
                await asyncio.sleep(0.01)
                for peer in peers:
                    await peer.averaging.apply(wait=False)
            assert all(peer.values == [2.0] * LARGE for peer in peers)
            per_peer = memory.most / len(peers)
            most = 3.2 if changes else 2.2  # one, the results of its round, and one that waits to be applied
            assert VOLUME < per_peer - copies < most * VOLUME
            await asyncio.sleep(31)  # as long as a round's memory is kept for the next one
            assert memory.now == 0

    with VolumeMemory() as memory:
        virtual_time.run(main(), timeout=300)


def test_the_rest_of_the_mates_go_on_without_one_that_dies_in_the_third_volume() -> None:
    async def main() -> None:
        network = MemoryNetwork(seed=1)
        async with swarm(0.0, 4.0, 8.0, network=network, size=SIZE, volume_bytes=12) as peers:
            rounds = record(peers[1].node, RoundFinished)
            for peer in peers:
                await peer.begin(peers, changes=False)
            await until(lambda: len(rounds) == 2)
            network.kill(peers[2].node.peer_id)
            assert all([await peer.averaging.apply(wait=True) for peer in peers[:2]])
            own, other = (peer.values + peer.statistics.tolist() for peer in peers[:2])
            assert own == other
            assert own[:4] == [4.0] * 4 and own[-2:] == [20.0] * 2  # (0 + 4 + 8) / 3, and then (0 + 4) / 2

    virtual_time.run(main(), timeout=300)


@pytest.mark.parametrize("changes", [False, True])
def test_a_volume_that_nobody_comes_to_ends_it_and_what_was_averaged_stays(changes: bool) -> None:
    async def main() -> None:
        async with swarm(0.0, 4.0, size=SIZE, volume_bytes=12) as peers:
            told, rounds = record(peers[0].node, Noticed), record(peers[0].node, RoundFinished)
            for peer in peers:
                await peer.begin(peers, changes=changes)
            await until(lambda: len(rounds) == 2)
            peers[1].averaging.drop()
            began = asyncio.get_running_loop().time()
            assert await peers[0].averaging.apply(wait=True)
            assert asyncio.get_running_loop().time() - began < 25  # for one volume, not for each of the rest
            assert peers[0].values[:3] == [2.0] * 3 and peers[0].values[-3:] == [0.0] * 3
            assert peers[0].statistics.tolist() == [0.0, 0.0]
            assert "to 6 of 6 of the states were not averaged after epoch 1, each peer keeps its own" in told[-1].text
            assert peers[0].averaging.passage is None
            for peer in peers:  # and the next time all is well
                await peer.begin(peers, tag=b"next", changes=changes)
            assert all([await peer.averaging.apply(wait=True) for peer in peers])
            assert peers[0].values == peers[1].values

    virtual_time.run(main(), timeout=300)


def test_volumes_are_applied_as_they_come_and_what_is_learned_is_kept() -> None:
    async def main() -> None:
        network = MemoryNetwork(seed=1, latency=0.2)
        async with swarm(0.0, 4.0, network=network, size=SIZE, volume_bytes=24) as peers:
            for peer in peers:
                await peer.begin(peers)
            parameter, averaging = peers[0].parameter, peers[0].averaging
            steps = applied = 0
            while averaging.passage is not None:
                parameter.data += 1.0
                steps += 1
                await asyncio.sleep(0.1)
                applied += await averaging.apply(wait=False)
            assert applied == 4
            assert peers[0].values == [2.0 + steps] * SIZE
            await peers[1].averaging.apply(wait=True)
            assert peers[1].values == [2.0] * SIZE

    virtual_time.run(main(), timeout=300)


def test_a_mate_with_a_slow_way_in_is_not_left_behind() -> None:
    async def main() -> None:
        network = MemoryNetwork(seed=1)
        async with swarm(0.0, 3.0, 6.0, network=network, size=LARGE // 4, volume_bytes=VOLUME) as peers:
            for peer in peers:
                network.set_bandwidth(peer.node.peer_id, VOLUME / 10)
            network.set_bandwidths(peers[2].node.peer_id, uplink=VOLUME / 10, downlink=VOLUME / 25)
            for peer in peers:
                await peer.begin(peers, changes=False)
            assert all([await peer.averaging.apply(wait=True) for peer in peers])
            assert all(peer.values == [3.0] * (LARGE // 4) for peer in peers)

    virtual_time.run(main(), timeout=3000)


@pytest.mark.parametrize("changes", [False, True])
def test_a_replaced_state_is_not_moved_by_the_volumes_that_are_left(changes: bool) -> None:
    async def main() -> None:
        network = MemoryNetwork(seed=1, latency=0.1)
        async with swarm(0.0, 2.0, network=network, size=SIZE, volume_bytes=12) as peers:
            captured = await peers[0].replica.capture()
            rounds = record(peers[0].node, RoundFinished)
            for peer in peers:
                await peer.begin(peers, changes=changes)
            await until(lambda: len(rounds) == 3)
            await peers[0].replica.restore(captured)
            await asyncio.sleep(3)
            await peers[0].averaging.apply(wait=False)
            assert peers[0].values == [0.0] * SIZE
            peers[0].averaging.drop()
            assert not await peers[0].averaging.apply(wait=True)
            assert peers[0].values == [0.0] * SIZE

    virtual_time.run(main(), timeout=300)


def test_shutting_down_in_the_middle_leaves_nothing_behind() -> None:
    async def main() -> None:
        async with swarm(0.0, 2.0, size=SIZE, volume_bytes=12) as peers:
            rounds = record(peers[0].node, RoundFinished)
            for peer in peers:
                await peer.begin(peers)
            await until(lambda: len(rounds) == 2)
            waiting = asyncio.ensure_future(peers[0].averaging.apply(wait=True))
            await asyncio.sleep(0)
            for peer in peers:
                await peer.averaging.shutdown()
                await peer.averaging.shutdown()
            assert not await waiting
            tasks = {task.get_coro().__qualname__ for task in asyncio.all_tasks()}
            assert not [name for name in tasks if name.startswith(("StateAveraging", "AveragerCore"))]
            assert memory.now == 0

    with VolumeMemory() as memory:
        virtual_time.run(main(), timeout=300)


def test_volumes_of_one_occasion_have_a_tag_each_and_the_first_is_the_lineage() -> None:
    tags = [Occasion(tag, 1, 1.0, None).tag_of(number) for tag in (b"lineage", b"another") for number in range(5)]
    assert tags[0] == b"lineage" and tags[5] == b"another"
    assert len(set(tags)) == len(tags)
