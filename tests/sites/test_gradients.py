"""The sums of all ranks meet at rank 0 when it hands in, and those that a reset has voided do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swarmcli.errors import OptimizerError
from swarmcli.optim.gradients.accumulator import Weighed
from swarmcli.sites.commands import LeaderCommands, StepVerdict, follow
from swarmcli.sites.gradients import GatherSums, RankSums, SiteAccumulator, average_gradients, sum_over_ranks
from swarmcli.sites.site import Site
from swarmcli.sites.step_sync import StepReport, announce, gather_reports, send_report
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
    """All ranks do what each letter says. Returns what rank 0 holds after each hand-in and at the end; at `c` its
    samples."""
    with Site.form(timeout=10) as site:
        trained, seen = parameters(), []
        if site.rank:
            sums = RankSums(site, trained)
            for letter in script:
                if letter in "ab":
                    gradients(trained, 10.0 * site.rank)
                    sums.add(Weighed.of(2))
                    send_report(site, StepReport(2, 2.0))
                if letter in "abh" and follow(site, {GatherSums: sums.hand_over}).void:
                    sums.clear()
            return seen
        commands = LeaderCommands(site)
        own = SiteAccumulator(commands, trained)
        for letter in script:
            if letter in "ab":  # b: without samples of rank 0
                gradients(trained, 1.0)
                (report,) = gather_reports(site)
                total = own.expect(Weighed.of(1) if letter == "a" else Weighed(), report.weighed)
                own.add(total.samples, weight=total.weight)
                announce(site, StepVerdict(0, void=own.take_void()))
            elif letter == "h":
                commands.open()
                own.freeze()
                seen.append(told(own))
                commands.shut()
                announce(site, StepVerdict(0, void=own.take_void()))
            elif letter == "c":
                seen.append(own.samples)
            else:
                {"r": own.reset, "t": own.restore, "s": own.settle}[letter]()
        return [*seen, told(own)[:2]]


FIRST = [0, 3, 7.0, 7.0, 0.0, 7.0]  # (1 · 1 + 2 · 10) / 3
BOTH = [0, 6, 7.0, 7.0, 0.0, 7.0]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("ahath", [FIRST, BOTH, [0, 6]]),
        ("ahsahs", [FIRST, FIRST, [0, 0]]),
        ("ahsbh", [FIRST, [0, 2, 10.0, 10.0, 0.0, 10.0], [0, 2]]),
        ("arh", [[0, 0, 0.0, 0.0, 0.0, 0.0], [0, 0]]),
        # The reset is news to the others with the next verdict: what they add before it is void, and not counted.
        ("caracch", [0, 1, 1, [0, 1, 1.0, 1.0, 0.0, 1.0], [0, 1]]),
        ("araach", [4, [0, 4, 5.5, 5.5, 0.0, 5.5], [0, 4]]),  # (2 · 1 + 2 · 10) / 4
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
            sums = RankSums(site, trained)
            sums.add(Weighed.of(2))
            follow(site, {GatherSums: sums.hand_over})
            return
        commands = LeaderCommands(site)
        own = SiteAccumulator(commands, trained)
        total = own.expect(Weighed.of(1), Weighed.of(2))
        own.reset()  # by another thread
        own.expect(Weighed.of(1), Weighed.of(2))
        own.add(total.samples)  # counted before the reset was known
        commands.open()
        own.freeze()
        commands.shut()
        announce(site, StepVerdict(0))
        assert told(own) == [0, 1, 1.0, 1.0, 0.0, 1.0]


@ranks(2)
def test_gradients_count_by_weight_whether_ranks_sum_them_or_average_them_in_every_step() -> None:
    """Rank 0 has four samples that weigh 1, rank 1 one sample that weighs 3."""
    with Site.form(timeout=10) as site:
        trained, batch = parameters(), Weighed.of(1, 3.0) if site.rank else Weighed.of(4, 1.0)
        gradients(trained, 10.0 * site.rank + 1.0)
        if site.rank:
            sums = RankSums(site, trained)
            sums.add(batch)
            follow(site, {GatherSums: sums.hand_over})
            average_gradients(site, trained, batch, Weighed())
            return
        commands = LeaderCommands(site)
        own = SiteAccumulator(commands, trained)
        total = own.expect(batch, Weighed(1, 3.0))
        own.add(total.samples, weight=total.weight)
        commands.open()
        assert own.freeze() == total == Weighed(5, 4.0) and float(own.means[0][0, 0]) == (1 * 1 + 3 * 11) / 4
        commands.shut()
        announce(site, StepVerdict(0))
        average_gradients(site, trained, batch, total)
        assert trained[0].grad is not None and float(trained[0].grad[0, 0]) == (1 * 1 + 3 * 11) / 4


@ranks(2)
def test_large_tensors_are_summed_in_pieces_and_small_ones_together() -> None:
    with Site.form(timeout=20) as site:
        tensors = [torch.arange(count, dtype=torch.float64) * (site.rank + 1) for count in (5, 1_500_000, 1, 7)]
        sum_over_ranks(site, tensors)
        assert site.rank or all(torch.equal(each, 3.0 * torch.arange(len(each))) for each in tensors)


@ranks(2)
def test_local_updates_take_the_mean_over_all_samples_in_every_step() -> None:
    with Site.form(timeout=10) as site:
        trained, seen = parameters(), []
        for own, other in ((1, 3), (0, 2), (2, 0), (0, 0)):
            batch, total = Weighed(own, float(own)), Weighed(own + other, float(own + other))
            gradients(trained, 10.0 * site.rank + 1.0)
            average_gradients(site, trained, Weighed(other, float(other)) if site.rank else batch, total)
            seen.append([None if p.grad is None else float(p.grad.flatten()[0]) for p in trained])
        weighted = [8.5, 8.5, None, 8.5]  # (1 · 1 + 3 · 11) / 4
        assert site.rank or seen == [weighted, *([each, each, None, each] for each in (11.0, 1.0, 1.0))]


@ranks(2)
def test_what_a_site_cannot_do_is_refused() -> None:
    with Site.form(timeout=10) as site:
        if site.rank == 0:
            commands = LeaderCommands(site)
            with pytest.raises(ValueError, match="reuse_grad_buffers"):
                SiteAccumulator(commands, parameters(), reuse=True)
            with pytest.raises(OptimizerError, match="GradScaler"):
                SiteAccumulator(commands, parameters()).add(1, 2.0)
