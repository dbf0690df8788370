"""Sites whose ranks make local updates and average by levels; each rank writes down its steps, to be done over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.sites import site_training
from tests.sites.site_training import OPTIMIZERS, Plan, loss_of, model, rows, schedule, weights

Entry = list[Any]  # of one step: the batch (epoch, turn) or None, the epoch afterwards, whether rank 0's model came


@dataclass
class Rank:
    """One process of a site under test."""

    net: torch.nn.Module
    steps: Any  # SiteLeader or SiteMember
    optimizer: Any  # rank 0's Optimizer, the others' torch optimizer
    log: list[Entry] = field(default_factory=list)
    batch: tuple[int, int] | None = None  # of the step under way
    levels: Any = None  # LeaderLevels or MemberLevels

    def step(self, batch: tuple[int, int] | None, size: int) -> None:
        """One step of the site, with these rows or without any."""
        self.steps.zero_grad()
        if batch is not None:
            loss_of(self.net, rows(dist.get_rank(), *batch, size)).backward()
        self.batch = batch
        self.steps.step(batch_size=size if batch is not None else 0)

    def train(self, size: int, *, epochs: int, turns: int) -> None:
        """In each epoch `turns` batches of `size` rows, then empty steps until it is over."""
        while (epoch := self.steps.local_epoch) < epochs:
            for turn in range(turns):
                self.step((epoch, turn), size)
                if self.steps.local_epoch != epoch:
                    break
            while self.steps.local_epoch == epoch:
                self.step(None, size)


@contextmanager
def site_rank(hierarchy: Mapping[int, int], *, target: int, kind: str = "momentum", **options: Any) -> Iterator[Rank]:
    """This process's part of a site; `options` as in site_training."""
    plan = Plan(kind, hierarchy=hierarchy, target=target, seeds=(0, 7))
    with site_training.site_rank(plan, **options) as made:
        rank = Rank(made.net, made.steps, made.optimizer, levels=made.gradients)
        finish = rank.levels.finish

        def finish_and_note(verdict: Any) -> None:
            rank.log.append([rank.batch, verdict.epoch, verdict.new_parameters])
            finish(verdict)

        rank.levels.finish = finish_and_note
        yield rank


def _whole(kind: str) -> Any:
    made, settings = OPTIMIZERS[kind]
    return partial(made, **settings)


def done_over(
    logs: Sequence[Sequence[Entry]], sizes: Sequence[int], hierarchy: Mapping[int, int], kind: str
) -> list[torch.Tensor]:
    """The weights of all ranks after the same steps in one process, of a site that is alone in its swarm."""
    nets = [model() for _ in sizes]
    optimizers = [_whole(kind)(net.parameters()) for net in nets]
    schedulers = [schedule(optimizer) for optimizer in optimizers]
    epoch = 0
    for step, entries in enumerate(zip(*logs, strict=True)):
        assert {given for _, _, given in entries} == {entries[0][1] != epoch}, "at an epoch's end rank 0's, the mean"
        for who in range(len(nets)):
            if entries[who][0] is not None:
                optimizers[who].zero_grad()
                loss_of(nets[who], rows(who, *entries[who][0], sizes[who])).backward()
                optimizers[who].step()
        group = next((hierarchy[period] for period in reversed(hierarchy) if step % period == 0), 1)
        if entries[0][1] != epoch:
            epoch, group = entries[0][1], len(sizes)
            for scheduler in schedulers:
                scheduler.step()
        _average(nets, group)
    return [weights(net) for net in nets]


@torch.no_grad()
def _average(nets: Sequence[torch.nn.Module], group: int) -> None:
    for first in range(0, len(nets), group):
        for params in zip(*(net.parameters() for net in nets[first : first + group]), strict=True):
            mean = torch.stack(list(params)).mean(0)
            for param in params:
                param.copy_(mean)
