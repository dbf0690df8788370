"""Members that lie about their gradients: nobody can tell, and what they get is bounded by the aggregator."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from swarmcli.averaging import RoundResult
from swarmcli.averaging.aggregators import Aggregator, CenteredClip, Mean, Median, TrimmedMean
from swarmcli.averaging.config import AllreduceOptions
from tests.adversary.company import liar_of
from tests.adversary.lies import LIES, Liar
from tests.adversary.lies.gradients import CHANGES, Change
from tests.averaging.averagers import Averagers, Peer, all_outcomes
from tests.simulation import simulated
from tests.suites import soak

NAMES = sorted(name for name, each in LIES.items() if each.layer == "gradients")
FEW = ["equivocation about gradients", "one number", "scaled beyond the gate"]
NUMEL = 400


class Members:
    """Honest gradients of one truth with noise of each member's own, and those of liars. Bounds are of one part."""

    def __init__(self, honest: int, liars: int, seed: int, change: Change) -> None:
        generator = torch.Generator().manual_seed(seed)
        truth = torch.randn(NUMEL, generator=generator)
        drawn = [truth + 3 * torch.randn(NUMEL, generator=generator) for _ in range(honest + liars)]
        self.honest = torch.stack(drawn[liars:])
        past = [[torch.randn(NUMEL, generator=generator)] for _ in range(5)]
        self.lies = [change([*past, [mine]], random.Random(seed))[0] for mine in drawn[:liars]]

    def aggregated(self, aggregator: Aggregator) -> torch.Tensor:
        sent = [*self.lies, *self.honest]
        part = aggregator.part(torch.empty(NUMEL), len(sent))
        for index, values in enumerate(sent):
            part.add(values, 1.0, index)
        return part.finish()[0]

    def distance(self, average: torch.Tensor) -> float:
        """From the honest mean, in units of the honest member's that is furthest from it."""
        mean = self.honest.mean(0)
        return float((average - mean).norm() / (self.honest - mean).norm(dim=1).max())


def bound_of_a_mean(members: Members, average: torch.Tensor, liars: int) -> None:
    """No element moves by more than the liars' share of what the gate lets through."""
    largest = float(members.honest.abs().max())
    moved = float((average - members.honest.mean(0)).abs().max())
    assert moved <= liars / (liars + len(members.honest)) * (1000.0 + 1.0) * largest


def bound_of_orders(members: Members, average: torch.Tensor, _: int) -> None:
    """Each element lies between those of honest members."""
    assert (average >= members.honest.min(0).values - 1e-6).all()
    assert (average <= members.honest.max(0).values + 1e-6).all()


def bound_of_clips(members: Members, average: torch.Tensor, liars: int) -> None:
    """The average stays closer to the honest mean than honest members are: by their share, but for a half."""
    assert members.distance(average) <= 0.25 + liars / (liars + len(members.honest))


@pytest.mark.parametrize(
    ("aggregator", "bound"),
    [
        (Mean(), bound_of_a_mean),
        (Median(), bound_of_orders),
        (TrimmedMean(), bound_of_orders),
        (CenteredClip(), bound_of_clips),
    ],
    ids=lambda each: getattr(each, "description", ""),
)
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_third_of_the_members_can_do_to_an_average(
    name: str, aggregator: Aggregator, bound: Callable[[Members, torch.Tensor, int], None]
) -> None:
    for seed, (liars, honest) in enumerate([(1, 3), (2, 6), (3, 13), (5, 11)]):
        members = Members(honest, liars, seed, CHANGES[name][0])
        bound(members, members.aggregated(aggregator), liars)


@pytest.mark.parametrize("name", ["sign flip", "scaled", "random", "a little is enough", "inner product"])
def test_even_seven_of_sixteen_move_a_clipped_average_no_further_than_by_what_honest_members_differ(name: str) -> None:
    members = Members(9, 7, 0, CHANGES[name][0])
    assert members.distance(members.aggregated(CenteredClip())) <= 1.5


@pytest.mark.parametrize("name", [*FEW, *soak(name for name in NAMES if name not in FEW)])
@simulated
async def test_a_round_with_a_liar_commits_for_all_within_the_bound(name: str) -> None:
    async with Averagers(3) as swarm:
        aggregator = Mean() if "beyond" in name else CenteredClip()
        options = AllreduceOptions(part_size_bytes=256, aggregator=aggregator)
        peers = [await swarm.add_one(allreduce=options, tensors=[torch.zeros(NUMEL)]) for _ in range(4)]
        liar = liar_of(peers[0])
        LIES[name].tell(liar)
        for number in range(2):
            await check_round(peers, liar, number)


async def check_round(peers: list[Peer], liar: Liar, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    truth = torch.randn(NUMEL, generator=generator)
    brought = [truth + torch.randn(NUMEL, generator=generator) for _ in peers]
    for peer, values in zip(peers, brought, strict=True):
        peer.core._tensors[0].copy_(values)
    outcomes = await all_outcomes([peer.begin(timeout=60) for peer in peers])
    assert len(liar.told) == number + 1
    for peer, outcome in zip(peers, outcomes, strict=True):
        assert isinstance(outcome, RoundResult), outcome
        assert torch.equal(peer.core._tensors[0], peers[1].core._tensors[0])
        assert bool(outcome.left_out) == isinstance(peer.core.config.allreduce.aggregator, Mean)
    honest = torch.stack(brought[1:])
    moved = (peers[1].core._tensors[0] - honest.mean(0)).norm()
    assert moved <= (honest - honest.mean(0)).norm(dim=1).max()
