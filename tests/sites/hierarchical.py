"""Sites whose ranks make local updates and average by levels; each rank writes down its steps, to be done over."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from swarmcli.dht import DHT
from swarmcli.optim import Optimizer
from swarmcli.optim.modes.base import SiteHooks
from swarmcli.sites.commands import LeaderCommands
from swarmcli.sites.hierarchy import LeaderLevels, MemberLevels
from swarmcli.sites.site import Site
from swarmcli.sites.steps import SiteLeader, SiteMember
from tests.sites.site_training import OPTIMIZERS, loss_of, model, rows, schedule, weights

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
def site_rank(
    hierarchy: Mapping[int, int],
    *,
    target: int,
    kind: str = "momentum",
    timeout: float = 10.0,
    contacts: Sequence[str] = (),
    wants_to_stop: threading.Event | None = None,
    **options: Any,
) -> Iterator[Rank]:
    """This process's part of a site; `options` are the Optimizer's."""
    net = model(0 if dist.get_rank() == 0 else 7)
    with Site.form(timeout=timeout) as site:
        if dist.get_rank() == 0:
            options |= {"params": list(net.parameters()), "optimizer": _whole(kind), "target_batch_size": target}
            with _leader(site, net, hierarchy, contacts, wants_to_stop, options) as rank:
                yield rank
        else:
            optimizer = _whole(kind)(net.parameters())
            levels = MemberLevels(site, optimizer, hierarchy)
            with SiteMember(site, net, levels, wants_to_stop=wants_to_stop) as member:
                rank = Rank(net, member, optimizer)
                member.load_state_from_peers()
                _write_down(levels, rank)
                yield rank


def _whole(kind: str) -> Any:
    made, settings = OPTIMIZERS[kind]
    return partial(made, **settings)


@contextmanager
def _leader(
    site: Site,
    net: torch.nn.Module,
    hierarchy: Mapping[int, int],
    contacts: Sequence[str],
    wants_to_stop: threading.Event | None,
    options: Mapping[str, Any],
) -> Iterator[Rank]:
    commands = LeaderCommands(site)
    levels = LeaderLevels(commands, list(net.parameters()), hierarchy)
    with DHT(contacts, start=True, host="127.0.0.1") as dht:
        optimizer = Optimizer(
            dht=dht, run_id="site", scheduler=schedule, offload_optimizer=False, grad_averager=None,
            site=SiteHooks(companions=levels), **options,
        )  # fmt: skip
        levels.lead(optimizer)
        with SiteLeader(commands, optimizer, net, levels, wants_to_stop=wants_to_stop) as leader:
            try:
                rank = Rank(net, leader, optimizer)
                leader.load_state_from_peers()
                _write_down(levels, rank)
                yield rank
            finally:
                optimizer.shutdown()


def _write_down(levels: Any, rank: Rank) -> None:
    finish = levels.finish

    def finish_and_note(verdict: Any) -> None:
        rank.log.append([rank.batch, verdict.epoch, verdict.new_parameters])
        finish(verdict)

    rank.levels, levels.finish = levels, finish_and_note


def done_over(
    logs: Sequence[Sequence[Entry]], sizes: Sequence[int], hierarchy: Mapping[int, int], kind: str
) -> list[torch.Tensor]:
    """The weights of all ranks after the same steps in one process, of a site that is alone in its swarm."""
    nets = [model() for _ in sizes]
    optimizers = [_whole(kind)(net.parameters()) for net in nets]
    schedulers = [schedule(optimizer) for optimizer in optimizers]
    epoch = 0
    for step, entries in enumerate(zip(*logs, strict=True)):
        assert not any(given for _, _, given in entries)
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
