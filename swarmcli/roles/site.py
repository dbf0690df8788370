"""The trainer as a site: several processes compute, rank 0 is the peer.

rank 0: run_site_leader                                every other rank: run_site_member
    a home, a journal, a place in the network              nothing but the model and a stream of data
    says who the peer is           ── Introduction ──▶     draws its own stream by it
    Optimizer in the swarm, SiteLeader around it           SiteMember
    TrainingLoop                     ◀─ every step ─▶      TrainingLoop
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from swarmcli.network import wire
from swarmcli.recipe import Recipe
from swarmcli.roles.collaboration import LINGER_SECONDS, Collaboration
from swarmcli.roles.peer import RunPeer
from swarmcli.roles.trainer import final_checkpoint, train
from swarmcli.roles.watch import RunWatch
from swarmcli.sites.gradients import LeaderGradients, LeaderMeans, LeaderSums, MemberGradients, MemberMeans, MemberSums
from swarmcli.sites.leader import SiteLeader
from swarmcli.sites.links import receive_bytes, send_bytes
from swarmcli.sites.member import SiteMember
from swarmcli.sites.orders import OrderDesk
from swarmcli.sites.site import Site
from swarmcli.training import (
    Compute,
    LoopResult,
    LoopSettings,
    TrainingLoop,
    build_task,
    choose_compute,
    parameter_groups,
    stream_seed,
)


class Introduction(msgspec.Struct, frozen=True):
    """What the others of a site have to know of the peer that they are together."""

    peer_id: bytes
    home: str  # the name of its directory


@contextmanager
def form_site(recipe: Recipe, local_rank: int) -> Iterator[tuple[Site, Compute]]:
    """Meets the other processes, each on its device. Raises RecipeError, or SiteError when they do not come."""
    compute = choose_compute(recipe, local_rank)
    site = Site.form(timeout=recipe.local.site.timeout, device=compute.device)
    try:
        yield site, compute
    finally:
        site.close()


def run_site_leader(
    peer: RunPeer,
    watch: RunWatch,
    stop: threading.Event,
    site: Site,
    compute: Compute,
    *,
    resume: str | None = None,
    on_epoch: Callable[[int], object] = lambda epoch: None,
) -> LoopResult:
    """Trains as rank 0; `on_epoch` hears of each epoch that the site has come to. Otherwise as `run_trainer`.

    Raises SiteError when the site has lost a process, or one of them has failed.
    """
    recipe, desk = peer.recipe, OrderDesk(site)
    introduction = wire.encode(Introduction(bytes(peer.peer_id), peer.home.path.name))
    for rank in site.others:
        send_bytes(site.pace, introduction, rank)
    gradients: list[LeaderGradients] = []

    def further(model: nn.Module) -> dict[str, Any]:
        if recipe.local_updates.enabled:
            gradients.append(LeaderMeans(site, trained_parameters(recipe, model)))
            return {}
        sums = LeaderSums(site, desk)
        gradients.append(sums)
        return {"accumulate": sums.accumulate}

    collaboration = Collaboration(peer, resume=resume, compute=compute, further=further)
    optimizer, model = collaboration.optimizer, collaboration.model
    leader = SiteLeader(site, desk, optimizer, model, gradients[0], wants_to_stop=stop)
    watch.follow(optimizer)
    try:
        result = train(collaboration, leader, leader.stopped, on_step=lambda report: on_epoch(optimizer.local_epoch))
        if result.reason == "data ended":
            leader.drain()
        if result.reason == "max_epochs":
            watch.state = "finished"
            final_checkpoint(collaboration)
            optimizer.linger(optimizer.local_epoch, LINGER_SECONDS)
        return result
    finally:
        peer.leave_summary(optimizer)
        collaboration.close()
        leader.close()


def run_site_member(recipe: Recipe, site: Site, compute: Compute, stop: threading.Event, *, home: Path | None) -> None:
    """Computes for rank 0 until that lets this process go. Raises SiteError when the site is broken."""
    introduction = wire.decode(Introduction, receive_bytes(site.pace, 0))
    task = build_task(recipe)
    model = task.build_model().to(compute.device)
    parameters = trained_parameters(recipe, model)
    gradients: MemberGradients = (
        MemberMeans(site, parameters) if recipe.local_updates.enabled else MemberSums(site, parameters)
    )
    member = SiteMember(site, model, gradients, wants_to_stop=stop)
    settings = LoopSettings(member_seed(recipe, introduction, site.rank), recipe.accumulation_steps, recipe.max_epochs)
    loop = TrainingLoop(task, model, member, settings, compute=compute, on_loss=member.note_loss)
    member.load_state_from_peers()
    if loop.run(member.stopped).reason == "data ended":
        member.drain()
    member.close()


def member_seed(recipe: Recipe, introduction: Introduction, rank: int) -> int:
    """Of the stream of data of a rank: unlike those of the others, of rank 0 and of all other peers."""
    return stream_seed(recipe.seed, introduction.peer_id + rank.to_bytes(4, "big"))


def trained_parameters(recipe: Recipe, model: nn.Module) -> list[nn.Parameter]:
    """In the order of the optimizer."""
    return [parameter for group in parameter_groups(recipe, model) for parameter in group["params"]]
