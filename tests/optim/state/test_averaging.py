"""Rounds over training states: who stepped together averages together, and a failure leaves every state as it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest
import torch

from swarmcli.averaging import AveragerConfig, MatchmakingOptions
from swarmcli.dht import DHTNode
from swarmcli.events import Noticed
from swarmcli.optim.state.averaging import Occasion, StateAveraging
from swarmcli.optim.state.replica import InPlace, Replica
from swarmcli.optim.state.training_state import TrainingState
from swarmcli.testing.memory_network import MemoryNetwork
from tests.optim.optim_swarm import make_node, record
from tests.simulation import now, simulated


@dataclass
class Peer:
    node: DHTNode
    parameter: torch.nn.Parameter
    statistics: torch.Tensor  # of batch norm, say
    counter: torch.Tensor
    averaging: StateAveraging

    @property
    def values(self) -> list[float]:
        return self.parameter.tolist()

    async def begin(self, peers: Sequence[Peer], weight: float = 1.0, tag: bytes = b"epoch") -> None:
        mates = tuple(peer.node.peer_id for peer in peers)
        await self.averaging.begin(Occasion(tag, 1, weight, mates), changes=True)


@asynccontextmanager
async def swarm(*values: float, network: MemoryNetwork | None = None) -> AsyncIterator[list[Peer]]:
    """Peers whose parameters (3) and statistics (2) begin with these values, in float32."""
    network = network or MemoryNetwork(seed=1)
    async with AsyncExitStack() as stack:
        peers: list[Peer] = []
        for number, value in enumerate(values):
            node = await make_node(network, number, peers[0].node if peers else None)
            stack.push_async_callback(node.shutdown)
            parameter = torch.nn.Parameter(torch.full((3,), value))
            statistics, counter = torch.full((2,), 10 * value), torch.tensor(number)
            optimizer = torch.optim.SGD([parameter], lr=1.0)
            state = TrainingState("run", optimizer, extra_tensors=[statistics, counter])
            config = AveragerConfig(prefix="state", matchmaking=MatchmakingOptions(min_matchmaking_time=10.0))
            averaging = StateAveraging(node, config, Replica(state, InPlace([parameter])), ())
            await averaging.start()
            stack.push_async_callback(averaging.shutdown)
            peers.append(Peer(node, parameter, statistics, counter, averaging))
        yield peers


@simulated
async def test_all_hold_the_weighted_mean_and_counters_are_left_alone() -> None:
    async with swarm(1.0, 2.0, 6.0) as peers:
        began = now()
        for peer, weight in zip(peers, (3.0, 1.0, 0.0), strict=True):
            await peer.begin(peers, weight)
        assert all([await peer.averaging.apply(wait=True) for peer in peers])
        assert now() - began < 1.0
        assert all(peer.values == [1.25] * 3 for peer in peers)
        assert all(peer.statistics.tolist() == [12.5] * 2 for peer in peers)
        assert [peer.counter.item() for peer in peers] == [0, 1, 2]


@simulated
async def test_what_is_learned_during_the_round_is_kept() -> None:
    async with swarm(0.0, 4.0) as peers:
        for peer in peers:
            await peer.begin(peers)
        with torch.no_grad():
            peers[0].parameter[0] += 100.0
        assert not await peers[0].averaging.apply(wait=False)  # not there yet
        assert peers[0].averaging.under_way
        await asyncio.sleep(5)
        assert [await peer.averaging.apply(wait=False) for peer in peers] == [True, True]
        assert peers[0].values == [102.0, 2.0, 2.0]
        assert peers[1].values == [2.0, 2.0, 2.0]
        assert not await peers[0].averaging.apply(wait=True)  # once only


@simulated
async def test_a_mate_that_is_gone_is_not_waited_for() -> None:
    network = MemoryNetwork(seed=1)
    async with swarm(0.0, 4.0, 9.0, network=network) as peers:
        network.kill(peers[2].node.peer_id)
        began = now()
        for peer in peers[:2]:
            await peer.begin(peers)
        assert all([await peer.averaging.apply(wait=True) for peer in peers[:2]])
        assert now() - began < 5.0
        assert peers[0].values == peers[1].values == [2.0] * 3


@pytest.mark.parametrize("wait", [True, False])
@simulated
async def test_a_round_that_nobody_comes_to_changes_nothing_and_is_told(wait: bool) -> None:
    async with swarm(1.0, 2.0) as peers:
        told = record(peers[0].node, Noticed)
        await peers[0].begin(peers)
        await asyncio.sleep(0 if wait else 60)
        assert not await peers[0].averaging.apply(wait=wait)
        assert peers[0].values == [1.0] * 3
        assert "the states were not averaged after epoch 1, each peer keeps its own" in told[-1].text
        assert not peers[0].averaging.under_way


@simulated
async def test_a_state_that_is_not_finite_stays_out_and_is_mended() -> None:
    async with swarm(1.0, 3.0, float("nan")) as peers:
        for peer in peers:
            await peer.begin(peers)
        for peer in peers:
            await peer.averaging.apply(wait=True)
        assert all(peer.values == [2.0] * 3 for peer in peers)


@simulated
async def test_rounds_of_other_epochs_do_not_mix() -> None:
    async with swarm(0.0, 2.0, 4.0, 8.0) as peers:
        for tag, pair in ((b"one", peers[:2]), (b"two", peers[2:])):
            for peer in pair:
                await peer.begin(pair, tag=tag)
        for peer in peers:
            assert await peer.averaging.apply(wait=True)
        assert [peer.values[0] for peer in peers] == [1.0, 1.0, 6.0, 6.0]


@simulated
async def test_a_replaced_state_is_not_moved_by_a_round_from_before() -> None:
    async with swarm(0.0, 2.0) as peers:
        for peer in peers:
            await peer.begin(peers)
        waiting = asyncio.ensure_future(peers[0].averaging.apply(wait=True))
        await asyncio.sleep(0)
        peers[0].averaging.drop()
        assert not await waiting
        assert peers[0].values == [0.0] * 3
        await peers[1].averaging.apply(wait=True)
        for peer in peers:  # and the next round is as any other
            await peer.begin(peers)
        assert all([await peer.averaging.apply(wait=True) for peer in peers])
        assert peers[0].values == peers[1].values
