"""A program of two phases that is easy to check, and averagers that run it on the memory network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from swarmcli.averaging import RoundResult
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.round.exchange import PartExchange
from swarmcli.averaging.round.program import Phases
from swarmcli.testing import MemoryNetwork
from tests.averaging.averagers import Averagers, Peer

SHAPES = ((50, 4), (60,), (7, 30))
SMALL_PARTS = AllreduceOptions(part_size_bytes=256, sender_timeout=5.0)


@dataclass
class Doubling:
    """RoundProgram: the first tensor becomes the mean x̄ of all x; then the others the means of x̄₀ y, where x̄₀ is the
    first element of x̄ and y = x₀ in all elements. So the results of one round are x̄ and x̄₀ x̄₀, of the same peers."""

    value: float  # x, in all elements
    description: str = "doubling"
    nbytes: int = 0
    phases: Sequence[Sequence[int]] = ((0,), (1, 2))
    tries: list[bytes] = field(default_factory=list)  # seeds

    def run(self, seed: bytes) -> Phases:
        self.tries.append(seed)
        (mean,) = yield self.inputs(0, 1.0)
        mean = mean.clone()
        products = yield self.inputs(1, float(mean.flatten()[0]))
        return [mean, *products]

    def inputs(self, phase: int, factor: float) -> list[torch.Tensor]:
        return [torch.full(SHAPES[index], factor * self.value) for index in self.phases[phase]]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [torch.full(shape, -1.0) for shape in SHAPES]


async def add(swarm: Averagers, value: float, **options: Any) -> Peer:
    program = Doubling(value)
    options = {"allreduce": SMALL_PARTS, "tensors": program.tensors, "program": program, **options}
    peer = await swarm.add_one(**options)
    return peer


def check(peers: Sequence[Peer], values: dict[Peer, tuple[float, float]], result: RoundResult) -> None:
    """All peers hold, in equal bits, what follows from the contributors alone. `values`: value and weight by peer."""
    counted = [values[peer] for peer in values if peer.peer_id in result.contributors]
    mean = sum(value * weight for value, weight in counted) / sum(weight for _, weight in counted)
    for peer in peers:
        for tensor, expected in zip(peer.core._tensors, (mean, mean * mean, mean * mean), strict=True):
            torch.testing.assert_close(tensor, torch.full_like(tensor, expected))
    for peer in peers[1:]:
        assert all(map(torch.equal, peer.core._tensors, peers[0].core._tensors))


def untouched(peer: Peer) -> bool:
    return all(bool((tensor == -1).all()) for tensor in peer.core._tensors)


def strike_in_step(
    patch: pytest.MonkeyPatch,
    step: int,
    victim: Peer,
    strike: Callable[[], object],
    after: float = 0.025,
    slow: MemoryNetwork | None = None,
) -> None:
    """Calls `strike` `after` seconds after the victim begins a step of its first try; with `slow` its line is slow."""
    ran, struck = PartExchange.gather, []

    async def heard(self: PartExchange) -> None:
        later = self.group.group_id != self.round_id
        if later == bool(step) and self.mates.endpoint is victim.endpoint and not struck:
            if slow is not None:
                slow.set_bandwidth(victim.peer_id, 8000.0)
            struck.append(asyncio.get_running_loop().call_later(after, strike))
        return await ran(self)

    patch.setattr(PartExchange, "gather", heard)
