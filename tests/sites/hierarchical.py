"""Sites whose ranks make local updates and average by levels; each rank writes down its steps, to be done over."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from swarmcli.dht import DHT
from swarmcli.optim import Optimizer
from swarmcli.sites.hierarchy import LeaderLevels, MemberLevels
from swarmcli.sites.leader import SiteLeader
from swarmcli.sites.member import SiteMember
from swarmcli.sites.orders import OrderDesk
from swarmcli.sites.site import Site
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
    contacts: Sequence[str] = (),
    wants_to_stop: threading.Event | None = None,
    **options: Any,
) -> Iterator[Rank]:
    """This process's part of a site; `options` are the Optimizer's."""
    net = model(0 if dist.get_rank() == 0 else 7)
    made, settings = OPTIMIZERS[kind]
    with Site.form(timeout=10.0) as site:
        if dist.get_rank() == 0:
            with _leader(site, net, hierarchy, made, settings, target, contacts, wants_to_stop, options) as rank:
                yield rank
        else:
            levels = MemberLevels(site, made(net.parameters(), **settings), hierarchy)
            with SiteMember(site, net, levels, wants_to_stop=wants_to_stop) as member:
                rank = Rank(net, member, levels._optimizer)
                member.load_state_from_peers()
                _write_down(levels, rank)
                yield rank


@contextmanager
def _leader(
    site: Site,
    net: torch.nn.Module,
    hierarchy: Mapping[int, int],
    made: Any,
    settings: Mapping[str, Any],
    target: int,
    contacts: Sequence[str],
    wants_to_stop: threading.Event | None,
    options: Mapping[str, Any],
) -> Iterator[Rank]:
    desk = OrderDesk(site)
    levels = LeaderLevels(site, desk, list(net.parameters()), hierarchy)
    with DHT(contacts, start=True, host="127.0.0.1") as dht:
        optimizer = Optimizer(
            dht=dht,
            run_id="site",
            target_batch_size=target,
            optimizer=made(net.parameters(), **settings),
            scheduler=schedule,
            grad_averager=None,
            companions=levels,
            **options,
        )
        levels.lead(optimizer)
        with SiteLeader(site, desk, optimizer, net, levels, wants_to_stop=wants_to_stop) as leader:
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

    levels.finish = finish_and_note


def done_over(logs: Sequence[Sequence[Entry]], sizes: Sequence[int], hierarchy: Mapping[int, int], kind: str) -> Any:
    """The weights of all ranks after the same steps in one process, of a site that is alone in its swarm."""
    made, settings = OPTIMIZERS[kind]
    nets = [model() for _ in sizes]
    optimizers = [made(net.parameters(), **settings) for net in nets]
    schedulers = [schedule(optimizer) for optimizer in optimizers]
    epoch = 0
    for step, entries in enumerate(zip(*logs, strict=True)):
        for who, (batch, _, given) in enumerate(entries):
            assert not given
            if batch is not None:
                optimizers[who].zero_grad()
                loss_of(nets[who], rows(who, *batch, sizes[who])).backward()
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
