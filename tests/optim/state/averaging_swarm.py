"""Peers that average small training states with each other, under virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import torch

from swarmcli.averaging import AveragerConfig, MatchmakingOptions
from swarmcli.dht import DHTNode
from swarmcli.optim.state.averaging import Occasion, StateAveraging
from swarmcli.optim.state.replica import InPlace, Replica
from swarmcli.optim.state.training_state import TrainingState
from swarmcli.testing.memory_network import MemoryNetwork
from tests.optim.optim_swarm import make_node

TAG = b"epoch"
Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


@dataclass
class Peer:
    node: DHTNode
    parameter: torch.nn.Parameter
    statistics: torch.Tensor  # of batch norm, say
    counter: torch.Tensor
    averaging: StateAveraging
    replica: Replica

    @property
    def values(self) -> list[float]:
        return self.parameter.tolist()

    async def begin(
        self, peers: Sequence[Peer], weight: float = 1.0, *, changes: bool = True, tag: bytes = TAG, epoch: int = 1
    ) -> None:
        mates = [peer.node.peer_id for peer in peers]
        await self.averaging.begin(Occasion(tag, epoch, weight, tuple(mates)), changes=changes)


def plain(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


@asynccontextmanager
async def swarm(
    *values: float,
    network: MemoryNetwork | None = None,
    size: int = 3,
    make: Make = plain,
    names: Sequence[str] = (),
) -> AsyncIterator[list[Peer]]:
    """Peers whose parameters (`size`) and statistics (2) begin with these values, in float32."""
    network = network or MemoryNetwork(seed=1)
    async with AsyncExitStack() as stack:
        peers: list[Peer] = []
        for number, value in enumerate(values):
            node = await make_node(network, number, peers[0].node if peers else None)
            stack.push_async_callback(node.shutdown)
            parameter = torch.nn.Parameter(torch.full((size,), value))
            statistics, counter = torch.full((2,), 10 * value), torch.tensor(number)
            state = TrainingState("run", make([parameter]), extra_tensors=[statistics, counter])
            replica = Replica(state, InPlace([parameter]))
            matchmaking = MatchmakingOptions(min_matchmaking_time=10.0)
            config = AveragerConfig(prefix="state", matchmaking=matchmaking)
            averaging = StateAveraging(node, config, replica, names)
            await averaging.start()
            stack.push_async_callback(averaging.shutdown)
            peers.append(Peer(node, parameter, statistics, counter, averaging, replica))
        yield peers
