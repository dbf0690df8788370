"""Hierarchical SGD lies between local SGD at its short and at its long period (arXiv 2007.13819, section 4).

Four members learn from data of their own, which differ; one is near its neighbour. What is compared is the spread of
their parameters: the mean square of the distance to the members' mean, over the whole training.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from swarmcli.sharding.levels import HierarchicalModelAverager
from swarmcli.testing import virtual_time
from tests.sharding.levels.swarm import Swarm
from tests.sharding.threads import DRAWING, in_threads

pytestmark = pytest.mark.soak

SIZE = 4
STEPS = 24
SHORT, LONG = 2, 12
LOCAL_SHORT, HIERARCHY, LOCAL_LONG = {SHORT: SIZE}, {SHORT: 2, LONG: SIZE}, {LONG: SIZE}


class Learner:
    """A member with a small network and an unlimited stream of its own data."""

    def __init__(self, number: int, seed: int) -> None:
        with DRAWING:
            torch.manual_seed(seed)
            self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
            self._common, *drawn = (torch.randn(4) for _ in range(SIZE + 1))
        self._own = drawn[number]
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self._generator = torch.Generator().manual_seed(1000 * seed + number)

    def learn(self) -> None:
        inputs = torch.randn(16, 4, generator=self._generator)
        targets = inputs @ (self._common + self._own)
        self._optimizer.zero_grad()
        torch.nn.functional.mse_loss(self.model(inputs)[:, 0], targets).backward()
        self._optimizer.step()

    def vector(self) -> torch.Tensor:
        return torch.cat([param.detach().reshape(-1) for param in self.model.parameters()])


def spread(vectors: list[torch.Tensor]) -> float:
    stacked = torch.stack(vectors)
    return (stacked - stacked.mean(0)).square().sum(1).mean().item()


def of_ranks(seed: int) -> list[float]:
    """The spread under each of the three, as every rank sees it."""
    found = []
    for levels in (LOCAL_SHORT, HIERARCHY, LOCAL_LONG):
        learner, averager, total = Learner(dist.get_rank(), seed), HierarchicalModelAverager(levels), 0.0
        for _ in range(STEPS):
            learner.learn()
            averager.average_parameters(learner.model.parameters())
            vectors = [torch.empty_like(learner.vector()) for _ in range(SIZE)]
            dist.all_gather(vectors, learner.vector())
            total += spread(vectors)
        found.append(total / STEPS)
    return found


def of_peers(seed: int) -> list[float]:
    async def one(levels: dict[int, int]) -> float:
        async with Swarm(seed) as swarm:
            learners = [Learner(number, seed) for number in range(SIZE)]
            for number, learner in enumerate(learners):
                place = f"place-{number // 2}" if len(levels) > 1 else ""
                await swarm.add(levels, place, tensors=list(learner.model.parameters()))
            total = 0.0
            for _ in range(STEPS):
                for learner in learners:
                    learner.learn()
                assert all(result is None or result.averaged for result in await swarm.average())
                total += spread([learner.vector() for learner in learners])
            return total / STEPS

    async def main() -> list[float]:
        return [await one(levels) for levels in (LOCAL_SHORT, HIERARCHY, LOCAL_LONG)]

    return virtual_time.run(main(), seed=seed)


def assert_between(short: float, hierarchy: float, long: float) -> None:
    """With room on both sides, or the order would be that of rounding."""
    assert 0 < 1.2 * short < hierarchy < long / 1.2, (short, hierarchy, long)


@pytest.mark.parametrize("seed", range(4))
def test_swarm_groups(seed: int) -> None:
    assert_between(*of_peers(seed))


def test_the_same_in_a_swarm_as_in_a_process_group() -> None:
    assert of_peers(9) == pytest.approx(in_threads(SIZE, of_ranks, 9)[0], rel=1e-4)
