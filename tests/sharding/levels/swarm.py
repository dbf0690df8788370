"""Peers of a hierarchy on the memory network under virtual time."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from swarmcli import testing
from swarmcli.averaging import AveragerConfig
from swarmcli.dht.node import DHTNode
from swarmcli.events import Event, RoundFinished
from swarmcli.sharding.levels.plan import LevelAverage, LevelPlan, outline, read_plan
from swarmcli.sharding.levels.swarm_groups import SwarmGroups
from swarmcli.sharding.levels.swarm_levels import SwarmLevels
from swarmcli.testing import virtual_time


@dataclass(eq=False)
class Peer:
    """A HierarchicalModelAverager that waits on an event loop."""

    node: DHTNode
    groups: SwarmGroups
    plan: LevelPlan
    levels: SwarmLevels
    tensors: list[torch.Tensor]
    step: int = 0
    events: list[Event] = field(default_factory=list)

    @property
    def config(self) -> AveragerConfig:
        """The config of the last level's averager."""
        meaning = outline(self.tensors, range(len(self.tensors))).hex()[:16]
        return replace(self.groups.configs(self.plan)[-1], meaning=meaning)

    @property
    def value(self) -> float:
        return self.tensors[0].flatten()[0].item()

    @property
    def rounds(self) -> list[RoundFinished]:
        return [event for event in self.events if isinstance(event, RoundFinished)]

    async def average(self) -> LevelAverage | None:
        self.step, average = await self.levels.take_step(self.tensors, self.step, range(len(self.tensors)))
        return average

    async def download(self, timeout: float) -> int | None:
        return await self.levels.download(self.tensors, timeout, range(len(self.tensors)))


class Swarm(testing.Swarm):
    """`async with Swarm(seed) as swarm: peer = await swarm.add({1: 4}, "")`. All leave at the end of the block."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed, latency=0.01)
        self.peers: list[Peer] = []

    async def add(
        self,
        levels: Mapping[int, int | None],
        place: str = "",
        *,
        value: float | None = None,
        tensors: Sequence[torch.Tensor] | None = None,
        **options: Any,
    ) -> Peer:
        """A peer whose tensors are full of `value`, its number unless given."""
        number = len(self.peers)
        node = await self.node()
        dht: Any = SimpleNamespace(node=node, client_mode=False)
        plan = read_plan(dict(levels), 0, swarm=True)
        groups = SwarmGroups(dht=dht, prefix="run", place=place, **options)
        fill = float(number) if value is None else value
        held = [torch.full((3,), fill), torch.full((2, 2), fill)] if tensors is None else list(tensors)
        peer = Peer(node, groups, plan, SwarmLevels(groups, plan), held)
        node.endpoint.events.subscribe(peer.events.append)
        self._ends.push_async_callback(peer.levels.shutdown)
        self.peers.append(peer)
        return peer

    async def average(self, *peers: Peer) -> list[LevelAverage | None]:
        """One step of all, or of these, at the same time."""
        return list(await asyncio.gather(*(peer.average() for peer in peers or self.peers)))


def odd_tensors(fill: float) -> list[torch.Tensor]:
    """Of several shapes and types, one of them not contiguous, one empty."""
    return [
        torch.full((3, 2), fill).t(),
        torch.full((), fill),
        torch.full((7,), fill, dtype=torch.bfloat16),
        torch.full((2, 2), fill, dtype=torch.float64),
        torch.empty(0, 4),
    ]


def in_swarm(seed: int) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Makes a test of a coroutine, which is given a swarm; under virtual time."""

    def decorate(check: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        def test(**given: Any) -> None:
            async def main() -> None:
                async with Swarm(seed) as swarm:
                    await check(swarm, **given)

            virtual_time.run(main(), seed=seed)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        _, *others = inspect.signature(check).parameters.values()
        test.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return test

    return decorate
