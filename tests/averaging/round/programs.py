"""A program of two phases that is easy to check, and averagers that run it on the memory network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.control import RoundResult
from swarmcli.averaging.round.allreduce import Allreduce
from swarmcli.testing import MemoryNetwork
from tests.averaging.averagers import Averagers, Peer

SHAPES = ((50, 4), (60,), (7, 30))
SMALL_PARTS = AllreduceOptions(part_size_bytes=256, sender_timeout=5.0)


@dataclass
class Doubling:
    """RoundProgram: the first tensor becomes the mean x̄ of all x; then the others the means of x̄₀ y, where x̄₀ is the
    first element of x̄ and y = x₀ in all elements. So the results of one round are x̄ and x̄₀ x̄₀, of the same peers."""

    value: float  # x, in all elements
    again: bool = False  # the first phase is done twice
    description: str = "doubling"
    nbytes: int = 0
    phases: Sequence[Sequence[int]] = ((0,), (1, 2))
    tries: list[bytes] = field(default_factory=list)  # seeds

    def begin(self, seed: bytes) -> DoublingRun:
        self.tries.append(seed)
        return DoublingRun(self)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [torch.full(shape, -1.0) for shape in SHAPES]


class DoublingRun:
    def __init__(self, program: Doubling) -> None:
        self._program = program
        self._averages: dict[int, list[torch.Tensor]] = {}
        self._firsts = 0

    def inputs(self, phase: int) -> list[torch.Tensor]:
        factor = 1.0 if phase == 0 else float(self._averages[0][0].flatten()[0])
        return [torch.full(SHAPES[index], factor * self._program.value) for index in self._program.phases[phase]]

    def take(self, phase: int, averages: Sequence[torch.Tensor]) -> int | None:
        self._averages[phase] = [average.clone() for average in averages]
        if phase == 1:
            return None
        self._firsts += 1
        return 0 if self._program.again and self._firsts == 1 else 1

    def results(self) -> list[torch.Tensor]:
        return [*self._averages[0], *self._averages[1]]


async def add(swarm: Averagers, value: float, *, again: bool = False, **options: Any) -> Peer:
    program = Doubling(value, again)
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
    """Calls `strike` so many seconds after the victim has begun a step of its first try, on a slow link if need be."""
    ran, struck = Allreduce.run, []

    async def heard(self: Allreduce):
        if self._step == step and self._service.endpoint is victim.endpoint and not struck:
            if slow is not None:
                slow.set_bandwidth(victim.peer_id, 8000.0)
            struck.append(asyncio.get_running_loop().call_later(after, strike))
        return await ran(self)

    patch.setattr(Allreduce, "run", heard)
