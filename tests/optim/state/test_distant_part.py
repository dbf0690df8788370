"""Statistics that lie in other processes are averaged as those here are, a few pieces at a time."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
import torch

from swarmcli.errors import OptimizerError, SiteError
from swarmcli.events import RoundFinished
from swarmcli.optim.state import distant_part
from swarmcli.optim.state.slots import statistic_slots
from swarmcli.optim.state.state_buffers import StateBuffers
from swarmcli.optim.state.volumes import cut
from swarmcli.testing import virtual_time
from swarmcli.testing.memory_network import MemoryNetwork
from tests.optim.optim_swarm import record, until
from tests.optim.state.averaging_swarm import Peer, swarm
from tests.optim.state.elsewhere import AdamElsewhere, Elsewhere, adam

SIZE = 40
NAMES = ("exp_avg", "exp_avg_sq")


def advance(peer: Peer, gradient: torch.Tensor) -> None:
    peer.parameter.grad = gradient
    peer.replica.state.optimizer.step()


def gradients(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(-64, 64, (SIZE,), generator=generator) / 16


def statistics(peer: Peer) -> Elsewhere:
    found = peer.replica.state.statistics
    assert isinstance(found, Elsewhere)
    return found


def state_of(peer: Peer) -> list[list[float]]:
    found = peer.replica.state.optimizer
    inner = found.inner if isinstance(found, AdamElsewhere) else found
    kept = inner.state[peer.parameter]
    return [peer.values, *(kept[name].tolist() for name in NAMES)]


async def averaged(make: type | object, changes: bool, volume_bytes: int, *, steps: int = 1) -> list[list[list[float]]]:
    """Two peers' states after one averaging, of which the second has its statistics where `make` says."""
    async with AsyncExitStack() as stack:
        options = {"size": SIZE, "names": NAMES, "volume_bytes": volume_bytes}
        network = MemoryNetwork(seed=1)
        peers = await stack.enter_async_context(swarm(1.0, 2.0, network=network, make=make, **options))  # type: ignore[arg-type]
        for number, peer in enumerate(peers):
            for _ in range(steps):
                advance(peer, gradients(number))
        for peer in peers:
            await peer.begin(peers, changes=changes)
        if changes:
            for number, peer in enumerate(peers):
                advance(peer, gradients(number + 2))
        assert all([await peer.averaging.apply(wait=True) for peer in peers])
        for peer in peers:
            if isinstance(peer.replica.state.optimizer, AdamElsewhere):
                assert statistics(peer).pinned == 0
                assert 0 < statistics(peer).most <= 64
        return [state_of(peer) for peer in peers]


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("volume_bytes", [1 << 20, 200, 100])
def test_they_are_averaged_as_those_in_memory_are_bit_for_bit(
    changes: bool, volume_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distant_part, "PIECE", 64)

    async def main() -> None:
        here, there = [await averaged(make, changes, volume_bytes) for make in (adam, AdamElsewhere)]
        assert here == there
        assert changes or here[0][1:] == here[1][1:]

    virtual_time.run(main(), timeout=300)


def test_what_the_optimizer_has_not_made_yet_counts_as_zero() -> None:
    async def main() -> None:
        options = {"size": SIZE, "names": NAMES, "make": AdamElsewhere, "volume_bytes": 100}
        async with swarm(1.0, 2.0, **options) as peers:  # type: ignore[arg-type]
            advance(peers[0], gradients(0))
            before = [torch.tensor(values) for values in state_of(peers[0])]
            for peer in peers:
                await peer.begin(peers, changes=False)
            assert all([await peer.averaging.apply(wait=True) for peer in peers])
            after = [torch.tensor(values) for values in state_of(peers[0])]
            assert torch.equal(after[1], before[1] / 2) and torch.equal(after[2], before[2] / 2)
            assert not peers[1].replica.state.optimizer.inner.state  # type: ignore[attr-defined]

    virtual_time.run(main(), timeout=300)


def test_their_average_does_not_wait_in_memory_for_the_trainer() -> None:
    """Nobody computes with statistics, so they are moved at once; parameters may be in use, and are moved later."""

    async def main() -> None:
        options = {"size": SIZE, "names": NAMES, "make": AdamElsewhere, "volume_bytes": 4 * SIZE}
        async with swarm(1.0, 2.0, **options) as peers:  # type: ignore[arg-type]
            for number, peer in enumerate(peers):
                advance(peer, gradients(number))
            rounds = record(peers[0].node, RoundFinished)
            before = state_of(peers[0])
            for peer in peers:
                await peer.begin(peers)
            await until(lambda: len(rounds) == 4 and len(peers[0].averaging._passage.averaged) == 2)
            assert state_of(peers[0])[0] == before[0]
            assert state_of(peers[0])[1:] == state_of(peers[1])[1:] != before[1:]
            assert await peers[0].averaging.apply(wait=False)

    virtual_time.run(main(), timeout=300)


@pytest.mark.parametrize("changes", [False, True])
def test_a_process_that_goes_is_named_and_the_others_go_on(changes: bool) -> None:
    async def main() -> None:
        options = {"size": SIZE, "names": NAMES, "make": AdamElsewhere, "volume_bytes": 4 * SIZE}
        async with swarm(1.0, 2.0, 6.0, **options) as peers:  # type: ignore[arg-type]
            for number, peer in enumerate(peers):
                advance(peer, gradients(number))
            rounds = record(peers[0].node, RoundFinished)
            for peer in peers:
                await peer.begin(peers, changes=changes)
            await until(lambda: len(rounds) == 1)
            statistics(peers[2]).gone = True
            with pytest.raises(SiteError, match="rank 1 is gone"):
                await peers[2].averaging.apply(wait=True)
            assert not peers[2].averaging.is_under_way
            assert all([await peer.averaging.apply(wait=True) for peer in peers[:2]])
            if not changes:
                assert state_of(peers[0]) == state_of(peers[1])

    virtual_time.run(main(), timeout=300)


def buffers(optimizer: AdamElsewhere, parameter: torch.Tensor, *names: str, most: int) -> list[StateBuffers]:
    slots = list(statistic_slots([parameter], optimizer, names))
    distant_part.check(optimizer.statistics, slots)
    extents = cut([slot.descriptor for slot in slots], most)
    return [StateBuffers(slots, each, optimizer.statistics) for each in extents]


def test_statistics_that_are_none_are_refused_by_name() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamElsewhere([parameter])
    assert buffers(optimizer, parameter, "exp_averages", most=4)  # who knows what it will make
    parameter.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(OptimizerError, match="there is no 'exp_averages'; there are step, exp_avg, exp_avg_sq"):
        buffers(optimizer, parameter, "exp_averages", most=4)
    with pytest.raises(OptimizerError, match=r"'step' has shape \(\)"):
        buffers(optimizer, parameter, "step", most=4)


def test_statistics_of_another_type_than_their_parameter_keep_it() -> None:
    parameter = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    optimizer = AdamElsewhere([parameter])
    optimizer.inner.state[parameter] = {"exp_avg": torch.arange(5, dtype=torch.float32)}
    for changes in (False, True):
        for volume in buffers(optimizer, parameter, "exp_avg", most=4):
            if changes:
                volume.pin(distant_part.pin(optimizer.statistics, volume._slots))
            volume.fill()
            assert all(tensor.dtype == torch.bfloat16 for tensor in volume.tensors)
            for tensor in volume.tensors:
                tensor.add_(1)
            volume.apply()
    exp_avg = optimizer.inner.state[parameter]["exp_avg"]
    assert exp_avg.dtype == torch.float32 and exp_avg.tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]
