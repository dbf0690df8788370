"""A small model trained by the ranks of a site, alone or in a swarm, and by one process with the samples of all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from swarmcli.dht import DHT
from swarmcli.optim import Optimizer
from swarmcli.sites.commands import LeaderCommands
from swarmcli.sites.gradients import SiteAccumulator
from swarmcli.sites.sharded_optimizer import ShareOfOptimizer, SiteOptimizer
from swarmcli.sites.site import Site
from swarmcli.sites.step_sync import SharedModel
from swarmcli.sites.steps import SiteLeader, SiteMember
from swarmcli.training import CheckpointStore, load_checkpoint
from tests.sharding.threads import DRAWING

TIGHT = {"rtol": 1e-9, "atol": 1e-11}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
}


def model(seed: int = 0) -> torch.nn.Module:
    with DRAWING:
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))


def weights(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def rows(who: int, epoch: int, turn: int, count: int) -> torch.Tensor:
    """What a rank computes in the given step of an epoch."""
    generator = torch.Generator().manual_seed(10_000 * who + 100 * epoch + turn)
    return torch.randn(count, 4, dtype=torch.float64, generator=generator)


def loss_of(net: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return ((net(batch) - batch.sum(1, keepdim=True)) ** 2).mean()


def train(steps: Any, net: torch.nn.Module, who: int, size: int, *, epochs: int, turns: int) -> None:
    """Anyone's loop; in each epoch it computes `turns` batches of `size` rows, then waits for its end."""
    while (epoch := steps.local_epoch) < epochs:
        for turn in range(turns):
            steps.zero_grad()
            loss_of(net, rows(who, epoch, turn, size)).backward()
            steps.step(batch_size=size)
            if steps.local_epoch != epoch:
                break
        while steps.local_epoch == epoch:
            steps.step(batch_size=0)


def reference(kind: str, sizes: Sequence[int], *, epochs: int, turns: int, each_turn: bool = False) -> torch.Tensor:
    """The weights after one process has stepped with all samples of each epoch, or of each turn."""
    net = model()
    made, settings = OPTIMIZERS[kind]
    optimizer = made(net.parameters(), **settings)
    scheduler = schedule(optimizer)
    for epoch in range(epochs):
        batches = [[rows(who, epoch, turn, size) for who, size in enumerate(sizes)] for turn in range(turns)]
        for batch in batches if each_turn else [[part for turn in batches for part in turn]]:
            optimizer.zero_grad()
            loss_of(net, torch.cat(batch)).backward()
            optimizer.step()
        scheduler.step()
    return weights(net)


@dataclass(frozen=True)
class Plan:
    """How a site of these tests trains. `sizes`: rows per batch at each rank."""

    kind: str = "momentum"
    sizes: tuple[int, ...] = (3, 5)
    turns: int = 2
    epochs: int = 4
    zero: bool = False
    local_updates: bool = False
    target: int | None = None  # None: what the site computes in its turns
    seeds: tuple[int, ...] = (0,)  # of the ranks' first weights; the last one is of all further ranks
    home: str = ""  # where a site with zero keeps its checkpoints, from which it goes on

    @property
    def target_batch_size(self) -> int:
        return self.turns * sum(self.sizes) if self.target is None else self.target

    def net(self, rank: int) -> torch.nn.Module:
        return model(self.seeds[min(rank, len(self.seeds) - 1)])


@dataclass
class Rank:
    """One process of a site under test."""

    site: Site
    net: torch.nn.Module
    steps: Any  # SiteLeader or SiteMember
    dht: DHT | None = None
    optimizer: Any = None  # rank 0's
    commands: LeaderCommands | None = None
    share: Any = None


@contextmanager
def site_rank(
    plan: Plan,
    *,
    timeout: float = 10.0,
    wants_to_stop: threading.Event | None = None,
    contacts: Sequence[str] = (),
    **options: Any,
) -> Iterator[Rank]:
    """This process's part of a site; `options` are the Optimizer's."""
    net = plan.net(dist.get_rank())
    with_site = _leader if dist.get_rank() == 0 else _member
    with with_site(plan, Site.form(timeout=timeout), net, wants_to_stop, contacts, options) as rank:
        rank.steps.load_state_from_peers()
        yield rank


@contextmanager
def _leader(
    plan: Plan, site: Site, net: torch.nn.Module, wants_to_stop: Any, contacts: Sequence[str], options: dict[str, Any]
) -> Iterator[Rank]:
    made, settings = OPTIMIZERS[plan.kind]
    commands, shared = LeaderCommands(site), SharedModel(site, net)
    trained, sums = list(net.parameters()), list[SiteAccumulator]()

    def accumulator(parameters: Any, *, reuse: bool) -> SiteAccumulator:
        sums.append(SiteAccumulator(commands, parameters, reuse=reuse))
        return sums[0]

    def sharded(params: Any) -> torch.optim.Optimizer:
        return SiteOptimizer(params, made, commands=commands, shared=shared, **settings)

    if plan.local_updates:
        options |= {"grad_averager": None}
    with DHT(contacts, start=True, host="127.0.0.1") as dht:
        optimizer = Optimizer(
            dht=dht, run_id="site", target_batch_size=plan.target_batch_size,
            optimizer=sharded if plan.zero else lambda params: made(params, **settings), params=trained,
            scheduler=schedule, make_accumulator=accumulator, **{"offload_optimizer": False, **options},
        )  # fmt: skip
        with SiteLeader(
            commands, optimizer, net, trained, sums[0] if sums else None, wants_to_stop=wants_to_stop
        ) as leader:
            try:
                if plan.home:
                    leader.await_ranks()
                    _go_on(Path(plan.home), optimizer, net)
                yield Rank(site, net, leader, dht, optimizer, commands)
            except BaseException:
                leader.break_off()
                raise
            finally:
                optimizer.shutdown()


@contextmanager
def _member(
    plan: Plan, site: Site, net: torch.nn.Module, wants_to_stop: Any, contacts: Sequence[str], options: dict[str, Any]
) -> Iterator[Rank]:
    made, settings = OPTIMIZERS[plan.kind]
    trained = list(net.parameters())
    share = ShareOfOptimizer(trained, made, site=site, **settings) if plan.zero else None
    handlers = share.handlers if share is not None else {}
    with SiteMember(
        site, net, trained, handlers, local_updates=plan.local_updates, wants_to_stop=wants_to_stop
    ) as member:
        yield Rank(site, net, member, share=share)


def _go_on(home: Path, optimizer: Any, net: torch.nn.Module) -> None:
    """From the newest checkpoint, if there is one."""
    home.mkdir(parents=True, exist_ok=True)
    optimizer.opt.statistics.spool = home
    for place in CheckpointStore(home / "site", "site").checkpoints.all()[:-2:-1]:
        checkpoint = load_checkpoint(place, "site")
        checkpoint.restore_model(net)
        optimizer.load_state_dict(checkpoint.optimizer)


@contextmanager
def plain_peer(
    net: torch.nn.Module, target: int, kind: str = "adamw", **options: Any
) -> Iterator[tuple[DHT, Optimizer]]:
    """A peer of the same run that is no site, and the first one of its swarm."""
    made, settings = OPTIMIZERS[kind]
    with DHT(start=True, host="127.0.0.1") as dht:
        optimizer = Optimizer(
            dht=dht, run_id="site", target_batch_size=target, optimizer=made(net.parameters(), **settings),
            scheduler=schedule, **options,
        )  # fmt: skip
        with shut_down_afterwards(optimizer):
            yield dht, optimizer


@contextmanager
def shut_down_afterwards(optimizer: Optimizer) -> Iterator[None]:
    try:
        yield
    finally:
        optimizer.shutdown()


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread
