"""Swarms of optimizers in one process, under virtual time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import torch

from swarmcli.dht import DHTNode
from swarmcli.events import EpochAdvanced, Event, Events
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import Identity, PeerID
from swarmcli.optim.arguments import averager_config
from swarmcli.optim.auxiliary import AuxiliaryCore
from swarmcli.optim.config import OptimizerConfig, PeerContext, PeerDescription, Role
from swarmcli.optim.core import OptimizerCore
from swarmcli.optim.modes.base import Trained
from swarmcli.optim.modes.gradients import Mode
from swarmcli.optim.participant import Participant
from swarmcli.optim.state.averaging import state_slots
from swarmcli.optim.state.replica import Offloaded
from swarmcli.testing.memory_network import MemoryNetwork
from tests.relaying import Relaying

FEATURES = 6
TARGET = 24  # samples per epoch
E, P = TypeVar("E", bound=Event), TypeVar("P", bound=Any)


def momentum(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.02, momentum=0.9)


def adamw(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02)


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + 0.1 * epoch))


async def make_node(
    network: MemoryNetwork, number: int, first: DHTNode | None = None, *, client_mode: bool = False, home: str = ""
) -> DHTNode:
    """A node whose identity and randomness follow from its number; `first` is its first contact. `home`: its address,
    which others may share."""
    place: dict[str, Any] = {"host": home, "port": 4000 + number} if home else {}
    transport = network.transport(Identity.from_seed(number), listening=not client_mode, **place)
    endpoint = Endpoint(transport, client_mode=client_mode, events=Events(), seed=number)
    await endpoint.start()
    contacts = [f"{address}/{first.peer_id.text}" for address in first.endpoint.addresses] if first else []
    return await DHTNode.create(endpoint, initial_peers=contacts)


@asynccontextmanager
async def nodes(count: int, *, clients: int = 0, seed: int = 0) -> AsyncIterator[list[DHTNode]]:
    """`count` nodes that know each other, the last `clients` of them in client mode."""
    network = MemoryNetwork(seed=seed)
    made = [await make_node(network, 0)]
    made += [await make_node(network, n, made[0], client_mode=n >= count - clients) for n in range(1, count)]
    try:
        yield made
    finally:
        for node in reversed(made):
            await node.shutdown()


def record(node: DHTNode, kind: type[E]) -> list[E]:
    """A list to which this peer's events of one kind are added from now on."""
    seen: list[E] = []
    node.endpoint.events.subscribe(lambda event: seen.append(event) if isinstance(event, kind) else None)
    return seen


def make_model(seed: int, dtype: torch.dtype = torch.float64) -> torch.nn.Parameter:
    """Weights of a linear model, shape (FEATURES,)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(torch.randn(FEATURES, dtype=torch.float64, generator=generator).to(dtype))


def loss_of(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Mean squared error of a linear model whose truth is the sum of the features; `rows` (samples, FEATURES)."""
    return ((rows @ weights - rows.sum(1)) ** 2).mean()


def weights_of(rows: torch.Tensor) -> torch.Tensor:
    """How much each row counts where they do not count alike, (samples,): some nothing."""
    return (10 * rows[:, 0]).clamp(min=0)


def weighed(rows: torch.Tensor) -> torch.Tensor:
    """Rows whose mean loss is the weighted mean of these: the loss grows with the square of a row."""
    return rows * (weights_of(rows) * len(rows) / weights_of(rows).sum().clamp(min=1e-9)).sqrt()[:, None]


class Trainer:
    """A peer that trains a small linear model, and remembers which samples went into which epoch."""

    def __init__(
        self,
        node: DHTNode,
        *,
        target: int = TARGET,
        batch_size: int = 4,
        seed: int = 0,
        data_seed: int | None = None,
        pace: float = 0.1,
        dtype: torch.dtype = torch.float64,
        make: Callable[..., torch.optim.Optimizer] = momentum,
        scheduler: Callable[..., Any] = decay,
        role: Role = "trainer",
        extra_tensors: Sequence[torch.Tensor] = (),
        mode: Mode | None = None,
        averaging: Mapping[str, Any] | None = None,
        weighs: bool = False,
        offload: bool = False,
        **options: Any,
    ) -> None:
        """`weighs`: its batches by `weights_of`, and not all rows alike. `offload`: its optimizer steps a copy."""
        self.weighs = weighs
        self.node, self.batch_size, self.pace = node, batch_size, pace
        self.seed, self.weights = seed, make_model(seed, dtype)
        self.data = torch.Generator().manual_seed(int.from_bytes(node.peer_id[:4]) if data_seed is None else data_seed)
        self.used: dict[int, torch.Tensor] = {}  # epoch → the rows of this peer that its average holds
        self.given: dict[str, torch.Tensor] = {}  # lineage → the rows of this peer with which it came about
        self.pending: list[torch.Tensor] = []
        self.epochs: list[EpochAdvanced] = record(node, EpochAdvanced)
        config = OptimizerConfig("run", target, description=PeerDescription(role), **options)
        self.place = Offloaded([self.weights], make) if offload else None
        optimizer = make([self.weights]) if self.place is None else self.place.optimizer
        peer = PeerContext(node, config, averager_config(config, options=averaging))
        self.core = OptimizerCore(peer, Trained(optimizer, scheduler(optimizer), extra_tensors, self.place), mode)

    @property
    def epoch(self) -> int:
        return self.core.position.epoch

    async def compute(self, rows: int | None = None) -> None:
        """Computes one batch and steps; takes `pace` seconds."""
        await asyncio.sleep(self.pace)
        batch = torch.randn(rows or self.batch_size, FEATURES, dtype=self.weights.dtype, generator=self.data)
        self.weights.grad = None
        loss_of(self.weights, weighed(batch) if self.weighs else batch).backward()
        self.pending.append(batch)
        weight = float(weights_of(batch).sum()) if self.weighs else None
        await self._stepped(self.core.step(len(batch), weight=weight))

    async def wait(self) -> None:
        """A step without samples: waits a moment for the epoch's end."""
        await self._stepped(self.core.step(0))

    async def train(self, until: int) -> None:
        while self.epoch < until:
            await self.compute()

    async def follow(self, until: int) -> None:
        while self.epoch < until:
            await self.wait()

    async def _stepped(self, step: Coroutine[Any, Any, bool]) -> None:
        if not await step:
            return
        last = self.epochs[-1]
        assert last.epoch == self.epoch
        if last.own_samples and last.own_samples == sum(map(len, self.pending)):
            self.used[last.epoch - 1] = self.given[last.lineage] = torch.cat(self.pending)
        self.pending = []


def reference(seed: int, epochs: list[torch.Tensor], make=momentum, scheduler=decay) -> torch.Tensor:
    """The weights of one process that takes each epoch's rows as one batch."""
    weights = make_model(seed, epochs[0].dtype)
    optimizer = make([weights])
    schedule = scheduler(optimizer)
    for rows in epochs:
        weights.grad = None
        loss_of(weights, rows).backward()
        optimizer.step()
        schedule.step()
    return weights.detach()


class Swarm:
    """Peers of one run on one simulated network. Peer 0 is a node without a trainer: everybody's first contact."""

    def __init__(self, seed: int = 0, *, contact_relays: bool = False, home: str = "", **network: Any) -> None:
        self.network = MemoryNetwork(seed=seed, **network)
        self.contact: DHTNode | None = None
        self.trainers: list[Trainer] = []
        self.killed: list[Trainer] = []
        self.relaying: dict[PeerID, Relaying] = {}
        self._contact_relays, self._home = contact_relays, home
        self._nodes: list[DHTNode] = []
        self._cores: list[Participant] = []

    async def __aenter__(self) -> Swarm:
        self.contact = await self.node(relays=self._contact_relays)
        return self

    async def __aexit__(self, *_: object) -> None:
        for core in self._cores:
            await core.shutdown()
        for node in reversed(self._nodes):
            await self.relaying[node.peer_id].close()
            await node.shutdown()

    async def node(self, *, client_mode: bool = False, relays: bool = False) -> DHTNode:
        """`relays`: it relays for others or, in client mode, is reached over relays from now on."""
        node = await make_node(self.network, len(self._nodes), self.contact, client_mode=client_mode, home=self._home)
        self._nodes.append(node)
        self.relaying[node.peer_id] = relaying = Relaying(node, takes_part=relays)
        await relaying.start(wait=self._contact_relays)
        return node

    async def trainer(self, *, client_mode: bool = False, relays: bool = False, **options: Any) -> Trainer:
        """A trainer that has been started, but has not joined yet."""
        return await self.add(Trainer(await self.node(client_mode=client_mode, relays=relays), **options))

    async def add(self, peer: P) -> P:
        """Starts a peer of any kind, and ends it with the swarm."""
        await self.start(peer.core)
        self.trainers.append(peer)
        return peer

    async def start(self, core: Participant) -> None:
        self._cores.append(core)
        await core.start()

    async def kill(self, trainer: Trainer) -> None:
        """SIGKILL: its connections are reset, and it says nothing more."""
        self.network.kill(trainer.node.peer_id)
        self.killed.append(trainer)

    def batches(self, epochs: int) -> list[torch.Tensor]:
        """Everything that went into each epoch."""
        return [torch.cat([t.used[e] for t in self.trainers if e in t.used]) for e in range(epochs)]


async def together(*work: Coroutine[Any, Any, Any]) -> None:
    """Runs all to their end; the first error ends the others."""
    async with asyncio.TaskGroup() as group:
        for each in work:
            group.create_task(each)


@asynccontextmanager
async def meanwhile(*work: Coroutine[Any, Any, Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Runs all beside the block, and gives up at its end what has not ended by itself."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def until(condition: Callable[[], bool], *, every: float = 0.01) -> None:
    """Looks every `every` seconds, and returns once the condition is true."""
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(every)
    raise TimeoutError("it never came true")


def digests(trainers: Iterable[Trainer]) -> set[str]:
    return {trainer.core.replica.state.digest() for trainer in trainers}


async def auxiliary(
    swarm: Swarm, *, client_mode: bool = False, target: int = TARGET, mode: Mode | None = None
) -> AuxiliaryCore:
    """An auxiliary that has been started."""
    core = assistant(await swarm.node(client_mode=client_mode), target, mode)
    await swarm.start(core)
    return core


async def assist(helper: AuxiliaryCore, until: float = math.inf) -> None:
    """It steps until this epoch."""
    while helper.position.epoch < until:
        await helper.step()


def assistant(node: DHTNode, target: int = TARGET, mode: Mode | None = None) -> AuxiliaryCore:
    """The auxiliary that stands on a node."""
    config, model = OptimizerConfig("run", target, description=PeerDescription("auxiliary")), make_model(0)
    peer = PeerContext(node, config, averager_config(config, auxiliary=True))
    states = state_slots([model], momentum([model]), mode.state.statistics if mode else (), ())
    return AuxiliaryCore(peer, [model], mode, list(states))
