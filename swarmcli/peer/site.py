"""The trainer as a site: several processes compute, rank 0 is the peer.

rank 0: run_site_leader                                every other rank: run_site_member
    a home, a journal, a place in the network              nothing but the model and a stream of data
    says who the peer is           ── Introduction ──▶     draws its own stream by it
    Optimizer in the swarm, SiteLeader around it           SiteMember
    TrainingLoop                     ◀─ every step ─▶      TrainingLoop
    the state of every epoch         ◀─ with zero ──▶      its share of the statistics

In a run that averages gradients each rank sums its own over the epoch, and rank 0 hands in all sums; with local updates
rank 0 steps with the mean of all ranks in every step. Either way, with `zero` every rank steps its share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from swarmcli.optim.modes.base import SiteHooks
from swarmcli.peer.activity import STAYS
from swarmcli.peer.collaboration import Collaboration
from swarmcli.peer.lifetime import come_into_step, pauses_of, train
from swarmcli.peer.peer import RunPeer
from swarmcli.peer.processors import sharing_processors
from swarmcli.peer.site_state import SiteState, load_share
from swarmcli.recipe import Recipe
from swarmcli.recipe.limit_store import LimitStore
from swarmcli.run.watch import RunWatch
from swarmcli.sites.checkpoint import SiteShards
from swarmcli.sites.commands import Command, LeaderCommands
from swarmcli.sites.gradients import LeaderGradients, LeaderMeans, LeaderSums, MemberGradients, MemberMeans, MemberSums
from swarmcli.sites.sharded_optimizer import ShareOfOptimizer, SiteOptimizer
from swarmcli.sites.site import Site
from swarmcli.sites.step_sync import SharedModel
from swarmcli.sites.steps import SiteLeader, SiteMember
from swarmcli.training import (
    STREAM,
    Compute,
    LoopResult,
    LoopSettings,
    TrainingLoop,
    build_task,
    choose_compute,
    optimizer_factory,
    optimizer_kind,
    parameter_groups,
    stream_seed,
)
from swarmcli.training.memory import check_memory
from swarmcli.training.resumed import Resume, resumed_place

Handlers = Mapping[type[Command], Callable[[Any], None]]


@dataclass(frozen=True)
class Leading:
    """Rank 0's Optimizer and its SiteLeader are made with these."""

    gradients: LeaderGradients
    options: dict[str, Any] = field(default_factory=dict)  # of the Optimizer


@dataclass(frozen=True)
class Following:
    """Another rank's SiteMember is made with these."""

    gradients: MemberGradients
    handlers: Handlers = field(default_factory=dict)
    shards: SiteShards | None = None  # to be closed behind the SiteMember


def leading(recipe: Recipe, commands: LeaderCommands, model: nn.Module) -> Leading:
    """For rank 0, while the other ranks call `following`. Raises SiteError when one does not come."""
    chosen = recipe.local.site
    parameters = trained_parameters(recipe, model)
    options: dict[str, Any] = {}
    if chosen.zero:
        around = partial(SiteOptimizer, commands=commands, shared=SharedModel(commands.site, model))
        options = {"optimizer": optimizer_factory(recipe, around)(parameter_groups(recipe, model)), "params": None}
    if recipe.local_updates.enabled:
        return Leading(LeaderMeans(commands.site, parameters), options)
    sums = LeaderSums(commands)
    return Leading(sums, {"site": SiteHooks(sums.make_accumulator), **options})


def following(recipe: Recipe, site: Site, model: nn.Module, home: Path) -> Following:
    """For the other ranks. `home`: the site's directory on this machine, for shares of sharded states."""
    chosen, parameters = recipe.local.site, trained_parameters(recipe, model)
    handlers, shards = {}, None
    if chosen.zero:
        kind, defaults = optimizer_kind(recipe)
        share = ShareOfOptimizer(parameter_groups(recipe, model), kind, site=site, **defaults)
        shards = SiteShards(site, home, share.zero)
        load_share(site, home, share.zero)
        handlers = {**share.handlers, **shards.handlers}
    members = MemberMeans if recipe.local_updates.enabled else MemberSums
    return Following(members(site, parameters), handlers, shards)


def trained_parameters(recipe: Recipe, model: nn.Module) -> list[nn.Parameter]:
    """In the order of the optimizer."""
    return [parameter for group in parameter_groups(recipe, model) for parameter in group["params"]]


class Introduction(msgspec.Struct, frozen=True):
    """Rank 0 tells the others of a site this of the peer that they are together."""

    peer_id: bytes
    home: str  # the name of its directory


@contextmanager
def form_site(recipe: Recipe, local_rank: int, store: Path | None = None) -> Iterator[tuple[Site, Compute]]:
    """Meets the other processes, each on its device. `store`: see Site.form. Raises RecipeError, or SiteError when
    they do not come."""
    compute = choose_compute(recipe, local_rank)
    with Site.form(timeout=recipe.local.site.timeout, device=compute.device, store=store) as site:
        yield site, compute


def run_site_leader(
    peer: RunPeer,
    watch: RunWatch,
    stop: threading.Event,
    site: Site,
    compute: Compute,
    *,
    resume: Resume | None = None,
    restarted: bool = False,
    on_epoch: Callable[[int], object] = lambda epoch: None,
) -> LoopResult:
    """Trains as rank 0 until the run has ended or a process of the site was told to stop; otherwise as `run_trainer`.

    `restarted`: goes on from the state of the life before. `on_epoch` hears of each epoch that the site has ended.
    Raises SiteError when the site has lost a process, or one of them has failed, and CheckpointError, when the site has
    been left, if the run's result could not be written.
    """
    place = resumed_place(peer.recipe, resume, peer.home.path) if resume else None
    site.share(Introduction, Introduction(bytes(peer.peer_id), peer.home.path.name))
    commands = LeaderCommands(site)
    collaboration, mode = _collaborate(peer, commands, compute)
    optimizer = collaboration.optimizer
    state = SiteState(collaboration, site, commands)
    optimizer.core.catch_up.gives_up = stop.is_set
    watch.follow(optimizer)
    pauses = pauses_of(collaboration, stop)
    with SiteLeader(
        commands,
        optimizer,
        collaboration.model,
        mode.gradients,
        wants_to_stop=stop,
        has_ended=collaboration.has_ended,
        rest=pauses.rest,
        heed=lambda: peer.activity.stop(STAYS.hasty),
    ) as leader:
        try:
            state.load(place, restarted=restarted)
            with pauses:
                result = _lead(collaboration, leader, state, watch, on_epoch)
        finally:
            peer.leave_summary(optimizer)
            collaboration.close()
            state.close()
    state.require_result()
    return result


def _collaborate(peer: RunPeer, commands: LeaderCommands, compute: Compute) -> tuple[Collaboration, Leading]:
    modes: list[Leading] = []

    def options(model: nn.Module) -> dict[str, Any]:
        modes.append(leading(peer.recipe, commands, model))
        return modes[0].options

    return Collaboration(peer, compute=compute, further=options), modes[0]


def _lead(
    collaboration: Collaboration,
    leader: SiteLeader,
    state: SiteState,
    watch: RunWatch,
    on_epoch: Callable[[int], object],
) -> LoopResult:
    saving = state.saving()
    come_into_step(collaboration, leader)
    state.forget_later()
    optimizer, seen = collaboration.optimizer, collaboration.optimizer.local_epoch
    with saving as saved:

        def after_step() -> None:
            nonlocal seen
            saved.look()
            if optimizer.local_epoch != seen:
                seen = optimizer.local_epoch
                on_epoch(seen)

        result = train(collaboration, leader, leader.stopped, on_step=after_step)
    collaboration.peer.saved = saved.outcome
    if result.reason == "data ended":
        leader.drain()
    if collaboration.has_ended():
        watch.state = "finished"
        state.write_final()
        collaboration.linger()
    return result


def run_site_member(recipe: Recipe, site: Site, compute: Compute, stop: threading.Event, *, home: Path | None) -> None:
    """Computes for rank 0 until that lets this process go. Raises SiteError when the site is broken.

    `home`: the directory of the site on this machine; None: where rank 0 has its own, if it is this machine.
    """
    introduction = site.share(Introduction, Introduction(b"", ""))  # rank 0's
    home = home or recipe.output_dir / recipe.run_id / introduction.home
    task = build_task(recipe)
    limits = LimitStore(recipe).limits
    check_memory(recipe, task.build_model(outline=True), "trainer", compute, limits=limits)
    model = task.build_model().to(compute.device)
    mode = following(recipe, site, model, home)
    seed = stream_seed_of(recipe, introduction, site.rank)
    with (
        sharing_processors(recipe, "trainer", home) as processors,
        closing(mode.shards) if mode.shards else nullcontext(),
        SiteMember(site, model, mode.gradients, mode.handlers, wants_to_stop=stop) as member,
    ):
        settings = LoopSettings(
            seed,
            recipe.accumulation_steps,
            stream_file=(home / STREAM).with_stem(f"stream-{site.rank}"),
            compile=recipe.local.torch_compile,
        )
        processors.take()
        loop = TrainingLoop(
            task,
            model,
            member,
            settings,
            compute=compute,
            on_loss=member.note_loss,
            on_step=processors.take,
        )
        member.load_state_from_peers()
        if loop.run(member.stopped).reason == "data ended":
            member.drain()


def stream_seed_of(recipe: Recipe, introduction: Introduction, rank: int) -> int:
    """The seed of the stream of data of a rank but 0: unlike those of the others and of all other peers."""
    return stream_seed(recipe.seed, introduction.peer_id + rank.to_bytes(4, "big"))
