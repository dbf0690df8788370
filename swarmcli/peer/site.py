"""The trainer as a site: several processes compute, rank 0 is the peer.

rank 0: run_site_leader                                every other rank: run_site_member
    a home, a journal, a place in the network              nothing but the model and a stream of data
    says who the peer is           ── Introduction ──▶     draws its own stream by it
    Optimizer in the swarm, SiteLeader around it           SiteMember
    TrainingLoop                     ◀─ every step ─▶      TrainingLoop
    the state of every epoch         ◀─ with zero ───      its share of the statistics

In a run that averages gradients each rank sums its own over the epoch, and rank 0 hands in all sums; with local updates
rank 0 steps with the mean of all ranks in every step. Either way, with `zero` every rank steps its share.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor, nn

from swarmcli.peer.activity import STAYS_HASTY
from swarmcli.peer.collaboration import Collaboration
from swarmcli.peer.lifetime import come_into_step, pauses_of, train
from swarmcli.peer.peer import RunPeer
from swarmcli.peer.processors import sharing_processors
from swarmcli.peer.site_state import SiteState, rationed
from swarmcli.recipe import Recipe
from swarmcli.recipe.limit_store import LimitStore
from swarmcli.run.watch import RunWatch
from swarmcli.sites.commands import Handlers, LeaderCommands
from swarmcli.sites.gradients import SiteAccumulator
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


def leading_options(
    recipe: Recipe, commands: LeaderCommands, model: nn.Module, sums: list[SiteAccumulator]
) -> dict[str, Any]:
    """Returns options for rank 0's Optimizer; the other ranks call `following` meanwhile. Its accumulator goes into
    `sums`, except with local updates. Raises SiteError when a rank does not come."""
    options: dict[str, Any] = {}
    if recipe.local.site.zero:
        around = partial(SiteOptimizer, commands=commands, shared=SharedModel(commands.site, model))
        options = {"optimizer": optimizer_factory(recipe, around)(parameter_groups(recipe, model)), "params": None}

    def accumulator(parameters: Sequence[Tensor], *, reuse: bool) -> SiteAccumulator:
        sums.append(SiteAccumulator(commands, parameters, reuse=reuse))
        return sums[0]

    return options if recipe.local_updates.enabled else {"make_accumulator": accumulator, **options}


def following(recipe: Recipe, site: Site, model: nn.Module, stop: threading.Event) -> SiteMember:
    """Makes what the other ranks of a site run, which do what rank 0 commands."""
    handlers: Handlers = {}
    if recipe.local.site.zero:
        kind, defaults = optimizer_kind(recipe)
        handlers = ShareOfOptimizer(parameter_groups(recipe, model), kind, site=site, **defaults).handlers
    return SiteMember(
        site,
        model,
        trained_parameters(recipe, model),
        handlers,
        local_updates=recipe.local_updates.enabled,
        wants_to_stop=stop,
    )


def trained_parameters(recipe: Recipe, model: nn.Module) -> list[nn.Parameter]:
    """Returns them in the order of the optimizer."""
    return [parameter for group in parameter_groups(recipe, model) for parameter in group["params"]]


class Introduction(msgspec.Struct, frozen=True):
    """What rank 0 tells the other ranks of a site about the peer that they are together."""

    peer_id: bytes
    home: str  # the name of the peer's directory


@contextmanager
def form_site(recipe: Recipe, local_rank: int, store: Path | None = None) -> Iterator[tuple[Site, Compute]]:
    """Meets the site's other processes, each on its device. `store`: see Site.form. Raises RecipeError, or SiteError
    when they do not come."""
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
) -> LoopResult:
    """Trains as rank 0 until the run has ended or a process of the site was told to stop; otherwise as `run_trainer`.

    `restarted`: goes on from the state of the site's last start. Raises SiteError when the site has lost a process, or
    one of them has failed; and CheckpointError, at the very end, if the run's result could not be written.
    """
    place = resumed_place(peer.recipe, resume, peer.home.path) if resume else None
    site.share(Introduction, Introduction(bytes(peer.peer_id), peer.home.path.name))
    commands = LeaderCommands(site)
    sums: list[SiteAccumulator] = []
    collaboration = Collaboration(
        peer, compute=compute, further=lambda model: leading_options(peer.recipe, commands, model, sums)
    )
    optimizer = collaboration.optimizer
    state = SiteState(collaboration)
    optimizer.core.catch_up.gives_up = stop.is_set
    watch.follow(optimizer)
    pauses = pauses_of(collaboration, stop)
    with SiteLeader(
        commands,
        optimizer,
        collaboration.model,
        trained_parameters(peer.recipe, collaboration.model),
        sums[0] if sums else None,
        wants_to_stop=stop,
        has_ended=collaboration.has_ended,
        in_step=[pauses.rest],
        heed=lambda: peer.activity.stop(STAYS_HASTY),
    ) as leader:
        try:
            leader.await_ranks()
            state.load(place, restarted=restarted)
            with pauses:
                result = _lead(collaboration, leader, state, watch)
        except BaseException:
            leader.break_off()  # before the optimizer shuts down, which may wait for what the other ranks have
            raise
        finally:
            peer.leave_summary(optimizer)
            collaboration.close()
    state.require_result()
    return result


def _lead(
    collaboration: Collaboration,
    leader: SiteLeader,
    state: SiteState,
    watch: RunWatch,
) -> LoopResult:
    saving = state.saving()
    come_into_step(collaboration, leader)
    state.forget_later()
    with saving as saved:
        leader.in_step.append(rationed(saved.look))
        result = train(collaboration, leader, leader.stopped)
        if result.reason == "data ended":
            leader.drain()
    collaboration.peer.saved = saved.outcome
    if collaboration.has_ended():
        watch.state = "finished"
        state.write_final()
        collaboration.linger()
    return result


def run_site_member(recipe: Recipe, site: Site, compute: Compute, stop: threading.Event, *, home: Path | None) -> None:
    """Computes for rank 0 until rank 0 lets this process go. Raises SiteError when the site is broken.

    `home`: the directory of the site on this machine; None: where rank 0 has its own, if it is on this machine.
    """
    introduction = site.share(Introduction, Introduction(b"", ""))  # rank 0's
    home = home or recipe.output_dir / recipe.run_id / introduction.home
    task = build_task(recipe)
    limits = LimitStore(recipe).limits
    check_memory(recipe, task.build_model(outline=True), "trainer", compute, limits=limits)
    model = task.build_model().to(compute.device)
    seed = stream_seed_of(recipe, introduction, site.rank)
    with (
        sharing_processors(recipe, "trainer", home) as processors,
        following(recipe, site, model, stop) as member,
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
    """Returns the seed of the data stream of a rank other than 0: unlike those of the other ranks and of all other
    peers."""
    return stream_seed(recipe.seed, introduction.peer_id + rank.to_bytes(4, "big"))
