"""The sums of all ranks meet at rank 0 when it hands in, and those that a reset has voided do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from swarmcli.errors import OptimizerError
from swarmcli.optim.gradients.accumulator import Weighed
from swarmcli.sites.commands import CommandFollower, LeaderCommands
from swarmcli.sites.gradients import (
    LeaderMeans,
    LeaderSums,
    MemberMeans,
    MemberSums,
    SiteAccumulator,
    sum_over_ranks,
)
from swarmcli.sites.site import Site
from swarmcli.sites.step_sync import StepReport, StepVerdict, announce, gather_reports, hear_verdict, send_report
from tests.sharding.threads import in_threads, ranks


def parameters() -> list[torch.Tensor]:
    """Of several types; one of them never has a gradient."""
    kinds = [((3, 2), torch.float64), ((5,), torch.bfloat16), ((2,), torch.float64), ((), torch.float32)]
    return [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape, dtype in kinds]


def gradients(trained: list[torch.Tensor], value: float) -> None:
    for parameter in trained[:2] + trained[3:]:
        parameter.grad = torch.full_like(parameter, value)


def told(sums: SiteAccumulator) -> list[Any]:
    return [sums.samples, sums.handed_in.samples, *(float(mean.flatten()[0]) for mean in sums.means)]


def sum_up(script: str) -> list[Any]:
    """All ranks do what each letter says. What rank 0 holds after each hand-in, and at the end; at `c` its samples."""
    with Site.form(timeout=10) as site:
        trained, seen = parameters(), []
        if site.rank:
            sums = MemberSums(site, trained)
            follower = CommandFollower(site, sums.handlers)
            follower.start()
            for letter in script:
                if letter in "ab":
                    gradients(trained, 10.0 * site.rank)
                    sums.prepare(Weighed.of(2))
                    send_report(site, StepReport(2, 2.0, generation=sums.generation))
                    sums.contribute(Weighed.of(2))
                    sums.finish(hear_verdict(site))
                if letter == "h":
                    site.meet()  # as in a step, in which all wait for rank 0
            follower.join()
            return seen
        commands = LeaderCommands(site)
        leader = LeaderSums(commands)
        own = leader.make_accumulator(trained, reuse=False)
        for letter in script:
            if letter in "ab":  # b: without samples of rank 0
                gradients(trained, 1.0)
                total = leader.take(Weighed.of(1) if letter == "a" else Weighed(), gather_reports(site))
                own.add(total.samples, weight=total.weight)
                announce(site, StepVerdict(0, generation=leader.generation))
                leader.finish(StepVerdict(0))
            elif letter == "h":
                own.freeze()
                seen.append(told(own))
                site.meet()
            elif letter == "c":
                seen.append(own.samples)
            else:
                {"r": own.reset, "t": own.restore, "s": own.settle}[letter]()
        commands.close()
        return [*seen, told(own)[:2]]


FIRST = [0, 3, 7.0, 7.0, 0.0, 7.0]  # (1 · 1 + 2 · 10) / 3
BOTH = [0, 6, 7.0, 7.0, 0.0, 7.0]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("ahs", [FIRST, [0, 0]]),
        ("aahs", [BOTH, [0, 0]]),
        ("ahath", [FIRST, BOTH, [0, 6]]),
        ("ahsahs", [FIRST, FIRST, [0, 0]]),
        ("ahsbh", [FIRST, [0, 2, 10.0, 10.0, 0.0, 10.0], [0, 2]]),
        ("arh", [[0, 0, 0.0, 0.0, 0.0, 0.0], [0, 0]]),
        # The reset is news to the others with the next verdict: what they add before it is void, and not counted.
        ("caracch", [0, 1, 1, [0, 1, 1.0, 1.0, 0.0, 1.0], [0, 1]]),
        ("araach", [4, [0, 4, 5.5, 5.5, 0.0, 5.5], [0, 4]]),  # (2 · 1 + 2 · 10) / 4
        ("h", [[0, 0, 0.0, 0.0, 0.0, 0.0], [0, 0]]),
    ],
)
def test_what_rank_0_hands_in(script: str, expected: list[Any]) -> None:
    assert in_threads(2, sum_up, script)[0] == expected


@ranks(2)
def test_the_samples_of_void_sums_are_not_handed_in() -> None:
    """A command may bring the news of a reset before a verdict does."""
    with Site.form(timeout=10) as site:
        trained = parameters()
        gradients(trained, 1.0)
        if site.rank:
            sums = MemberSums(site, trained)
            sums.prepare(Weighed.of(2))
            follower = CommandFollower(site, sums.handlers)
            follower.start()
            follower.join()
            assert sums.generation == 1
            return
        commands = LeaderCommands(site)
        own = SiteAccumulator(commands, trained)
        own.reset()
        own.expect(Weighed.of(1))
        own.add(3)  # counted before the reset was known
        own.freeze()
        commands.close()
        assert told(own) == [0, 1, 1.0, 1.0, 0.0, 1.0]


@ranks(2)
def test_gradients_count_by_weight_whether_ranks_sum_them_or_average_them_in_every_step() -> None:
    """Rank 0 has four samples that weigh 1, rank 1 one sample that weighs 3."""
    with Site.form(timeout=10) as site:
        trained, batch = parameters(), Weighed.of(1, 3.0) if site.rank else Weighed.of(4, 1.0)
        gradients(trained, 10.0 * site.rank + 1.0)
        if site.rank:
            sums, means = MemberSums(site, trained), MemberMeans(site, trained)
            follower = CommandFollower(site, sums.handlers)
            follower.start()
            sums.prepare(batch)
            send_report(site, StepReport(batch.samples, batch.weight))
            hear_verdict(site)
            follower.join()
            send_report(site, StepReport(batch.samples, batch.weight))
            means.contribute(batch)
            return
        commands = LeaderCommands(site)
        leader = LeaderSums(commands)
        own = leader.make_accumulator(trained, reuse=False)
        total = leader.take(batch, gather_reports(site))
        own.add(total.samples, weight=total.weight)
        announce(site, StepVerdict(0))
        assert own.freeze() == total == Weighed(5, 4.0) and float(own.means[0][0, 0]) == (1 * 1 + 3 * 11) / 4
        commands.close()
        assert LeaderMeans(site, trained).take(batch, gather_reports(site)) == total
        assert float(trained[0].grad[0, 0]) == (1 * 1 + 3 * 11) / 4


@ranks(2)
def test_large_tensors_are_summed_in_pieces_and_small_ones_together() -> None:
    with Site.form(timeout=20) as site:
        tensors = [torch.arange(count, dtype=torch.float64) * (site.rank + 1) for count in (5, 1_500_000, 1, 7)]
        sum_over_ranks(site, site.commands, tensors)
        assert site.rank or all(torch.equal(each, 3.0 * torch.arange(len(each))) for each in tensors)


@ranks(2)
def test_local_updates_take_the_mean_over_all_samples_in_every_step() -> None:
    with Site.form(timeout=10) as site:
        trained, seen = parameters(), []
        for own, other in ((1, 3), (0, 2), (2, 0), (0, 0)):
            samples = other if site.rank else own
            batch = Weighed(samples, float(samples))
            gradients(trained, 10.0 * site.rank + 1.0)
            if site.rank:
                member = MemberMeans(site, trained)
                member.prepare(batch)
                send_report(site, StepReport(samples, float(samples)))
                member.contribute(batch)
                member.finish(hear_verdict(site))
            else:
                total = LeaderMeans(site, trained).take(batch, gather_reports(site))
                announce(site, StepVerdict(0))
                seen.append([total.samples, *(None if p.grad is None else float(p.grad.flatten()[0]) for p in trained)])
        weighted = [4, 8.5, 8.5, None, 8.5]  # (1 · 1 + 3 · 11) / 4
        others = [[2, 11.0, 11.0, None, 11.0], [2, 1.0, 1.0, None, 1.0], [0, 1.0, 1.0, None, 1.0]]
        assert site.rank or seen == [weighted, *others]


@ranks(2)
def test_what_a_site_cannot_do_is_refused() -> None:
    with Site.form(timeout=10) as site:
        if site.rank == 0:
            sums = LeaderSums(LeaderCommands(site))
            with pytest.raises(RuntimeError, match="without these hooks"):
                _ = sums.generation
            with pytest.raises(ValueError, match="reuse_grad_buffers"):
                sums.make_accumulator(parameters(), reuse=True)
            with pytest.raises(OptimizerError, match="GradScaler"):
                sums.make_accumulator(parameters(), reuse=False).add(1, 2.0)
        assert dist.get_rank() == site.rank
