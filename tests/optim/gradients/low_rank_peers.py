"""Peers that average gradients with PowerSGD or PowerEF: by arithmetic alone, or over the memory network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from swarmcli.averaging import RoundResult
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.round.program import advance
from swarmcli.optim.gradients.accumulator import GradientAccumulator
from swarmcli.optim.modes.low_rank import LowRank
from tests.averaging.averagers import Averagers, Peer

SHAPES: tuple[tuple[int, ...], ...] = ((12, 10), (8, 3, 2, 2), (5,), (), (1, 9), (0, 4), (3, 3))


def gradient_of(seed: int, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Gradients:
    """One peer's parameters, accumulator and method."""

    def __init__(
        self,
        mode: LowRank,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
        self.accumulator = GradientAccumulator(self.parameters)
        self.method = mode.method(self.accumulator.means)

    def accumulate(self, gradients: Sequence[torch.Tensor], samples: int) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        self.accumulator.add(samples)

    def draw(self, seed: int, samples: int) -> list[torch.Tensor]:
        """Takes in random gradients, and returns them."""
        gradients = [gradient_of(seed * 100 + i, p.shape, p.dtype) for i, p in enumerate(self.parameters)]
        if samples:
            self.accumulate(gradients, samples)
        return gradients

    def freeze(self) -> int:
        samples = self.accumulator.freeze().samples
        self.method.load(samples)
        return samples

    def finish(self, total: float, counted: bool = True) -> None:
        self.method.finish(total, counted)
        self.accumulator.settle()

    @property
    def averaged(self) -> list[torch.Tensor]:
        return [each.clone() for each in self.method.averaged]

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that outlives a round."""
        return {name: each.clone() for name, each in {**self.method.shared, **self.method.own}.items()}


def round_of(members: Sequence[Gradients], seed: bytes = b"group", left_out: Iterable[int] = ()) -> float:
    """A committed round by arithmetic: weighted means take the place of all-reduces. Returns the samples in it.

    Members of `left_out` take in the result without having a part in it.
    """
    weights = [0.0 if index in left_out else member.method.samples for index, member in enumerate(members)]
    total = sum(weights)
    runs = [member.method.program.run(seed) for member in members]
    steps = [advance(run, None) for run in runs]
    while not steps[0][1]:
        means = [
            torch.as_tensor(sum(w * each for w, each in zip(weights, tensors, strict=True)) / total)
            for tensors in zip(*(tensors for tensors, _ in steps), strict=True)
        ]
        steps = [advance(run, means) for run in runs]
    for index, (member, (results, _)) in enumerate(zip(members, steps, strict=True)):
        for tensor, result in zip(member.method.tensors, results, strict=True):
            tensor.copy_(result)
        member.finish(total, index not in set(left_out))
    return total


def broken_off(gradients: Gradients, phases: int) -> None:
    """A try that ends after `phases` phases."""
    run = gradients.method.program.run(b"failed")
    tensors, _ = advance(run, None)
    for _ in range(phases):
        tensors, _ = advance(run, tensors)
    run.close()


async def join(swarm: Averagers, gradients: Gradients, **options: Any) -> Peer:
    """A peer on the network with these gradients."""
    settings = {"allreduce": AllreduceOptions(part_size_bytes=512, sender_timeout=5.0), **options}
    method = gradients.method
    return await swarm.add_one(tensors=method.tensors, program=method.program, **settings)


async def conclude(peer: Peer, gradients: Gradients, result: RoundResult) -> None:
    """Ends the method's round, as its caller does after the commit."""
    async with peer.core.tensors():
        gradients.finish(result.total_weight, peer.peer_id in result.contributors)


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
