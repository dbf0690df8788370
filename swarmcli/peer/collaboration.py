"""Makes of a recipe a model, and an optimizer whose steps the whole run takes together: the same for every role."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swarmcli.averaging import Aggregator, CenteredClip, Mean, Median, TrimmedMean
from swarmcli.checkpoints.layout import checkpoints_below, epoch_of
from swarmcli.dht import DHT, DHTNode
from swarmcli.errors import CheckpointError, JournalError, RecipeError
from swarmcli.events import Evaluated, Noticed
from swarmcli.files.durable import write_file
from swarmcli.network.identity import PeerID
from swarmcli.optim import GradientAverager, Optimizer, PowerEFGradientAverager, PowerSGDGradientAverager, Sparse
from swarmcli.optim.config import Role
from swarmcli.optim.epoch.seat import before_joining
from swarmcli.optim.peers.proof import Heard, SignedByOwner
from swarmcli.optim.peers.report import PeerReport
from swarmcli.optim.state.lineage import LineagePosition
from swarmcli.peer.disk import room_for
from swarmcli.peer.home import BEGAN, ENDS, remembered
from swarmcli.peer.peer import RunPeer
from swarmcli.recipe import AggregatorSettings, GradientAveragingSettings, Recipe, digest_of
from swarmcli.recipe.run_key import is_owners_position
from swarmcli.recipe.task_names import CUSTOM
from swarmcli.run.contributions import Attestation
from swarmcli.run.counting import ContributionKeeper, ContributionReader, RunView
from swarmcli.run.evaluations import RunEvaluations
from swarmcli.training import (
    Checkpoint,
    Compute,
    Task,
    build_scheduler,
    build_task,
    check_smoothing,
    choose_compute,
    load_checkpoint,
    optimizer_factory,
    parameter_groups,
    saved_buffers,
)
from swarmcli.training.adapters import is_quantized, place_model
from swarmcli.training.demand import COMPRESSIONS
from swarmcli.training.freezing import check_frozen, run_weights, stored_bytes
from swarmcli.training.memory import check_memory
from swarmcli.training.merging import remember_base
from swarmcli.training.outline import outline_of
from swarmcli.training.resumed import Resume, by_recipe, resumed_place
from swarmcli.training.schedule import AVERAGE, outer_steps
from swarmcli.training.tasks.base import ModelTask


class Collaboration:
    """A peer's model, task and collaborative optimizer. Made in the main thread; `close` says goodbye to the run."""

    def __init__(
        self,
        peer: RunPeer,
        *,
        resume: Resume | None = None,
        auxiliary: bool = False,
        task: Task | None = None,
        compute: Compute | None = None,
        further: Callable[[nn.Module], dict[str, Any]] = lambda model: {},
    ) -> None:
        """Builds the model (from the checkpoint `resume`, if given) and makes the peer known to the run.

        `task`: one that a script brings, for a recipe with `task: custom`. Peers meet whose recipes agree; whether
        their scripts agree as well is up to them. `compute`: None is what the recipe says for a trainer, and host
        memory for others: there an auxiliary needs only the model's shapes, and a monitor holds the model but trains
        nothing. `further` arguments of the Optimizer that depend on the model win over the recipe's. Raises
        RecipeError, DataError or CheckpointError with the fix, before others are told anything.
        """
        recipe = peer.recipe
        for note in (*recipe.notes, *peer.limits.notes):
            peer.events.emit(Noticed("info", note))
        self.peer = peer
        self.compute: Compute = compute or compute_of(recipe, peer.role)
        peer.governor.compute_on_card(self.compute.device.type != "cpu")
        self.task: Task  # an auxiliary has none
        self.model: nn.Module
        checkpoint = None
        if task is not None and recipe.task != CUSTOM:
            raise RecipeError(
                f"{recipe.origin('task')}: task: the recipe names {recipe.task}, and this script brings a task of its "
                "own; write `task: custom`"
            )
        if task is not None or not auxiliary:
            self.task = task or build_task(recipe)
            check_smoothing(recipe, self.task)
        outline = outline_of(recipe) if auxiliary and task is None else self.task.build_model(outline=True)
        check_memory(recipe, outline, peer.role, self.compute, limits=peer.limits.limits)
        if auxiliary:
            self.model = outline
        else:
            checkpoint = load_checkpoint(resumed_place(recipe, resume, peer.home.path)) if resume else None
            self.model = self.task.build_model()
            check_frozen(recipe, self.model)
            if checkpoint is not None:
                checkpoint.restore_model(self.model)
            place_model(recipe, self.model, self.compute.device)
            if peer.role == "trainer" and isinstance(self.task, ModelTask):
                self.task.try_model(self.model, self.compute)
        self.optimizer = Optimizer(**self._options(recipe, auxiliary) | further(self.model))
        try:
            self._take_part(checkpoint)
        except BaseException:  # the caller has no object yet that it could close
            self.optimizer.shutdown()
            raise

    def _take_part(self, checkpoint: Checkpoint | None) -> None:
        """Makes this peer known to its run, with what the checkpoint says."""
        peer, recipe = self.peer, self.peer.recipe
        # Copies, since loading a checkpoint's statistics at a site overwrites the groups' settings.
        self._settings = [dict(group) for group in self.optimizer.param_groups]
        if checkpoint is None and getattr(self.model, "lacks_weights", False):
            lacking = (
                f"this computer lacks the weights of {recipe.base_model}, which the peer that begins the run needs"
            )
            self.optimizer.call(lambda core: core.catch_up.lack_parameters(lacking))
        if peer.role != "auxiliary":
            self.optimizer.call(lambda core: core.catch_up.note_heard(*peer.heard, begins_anew=peer.begins_anew))
        peer.governor.when_rates_change(self.optimizer.review_seat)  # may call it while a batch is computed
        if peer.role == "trainer" and (limit := peer.limits.limits.link) is not None:
            told = before_joining(self.optimizer.round_bytes, limit, recipe.target_batch_size)
            peer.events.emit(Noticed("info", told))
        if recipe.run_key is not None:
            self.optimizer.claims.vouching.signed_by_owner = owners_word(recipe, recipe.run_key)
        self.accounts = keep_accounts(peer, self.optimizer)
        self.evaluations = keep_evaluations(peer, self.optimizer)
        peer.members.take_part(self.optimizer, self.accounts)
        self.resumed: Path | None = None  # the checkpoint that this peer went on from
        if checkpoint is not None:
            self._take_over(checkpoint)

    def _options(self, recipe: Recipe, auxiliary: bool) -> dict[str, Any]:
        averaging = recipe.averaging
        return dict(
            dht=self.peer.dht,
            run_id=recipe.run_id,
            target_batch_size=recipe.target_batch_size,
            optimizer=optimizer_factory(recipe),
            params=parameter_groups(recipe, self.model),
            extra_tensors=saved_buffers(self.model),
            **(self._frozen_options(recipe.frozen_weights) if recipe.frozen_weights else {}),
            scheduler=None if auxiliary else partial(build_scheduler, recipe),
            matchmaking_time=averaging.matchmaking_time,
            averaging_timeout=averaging.averaging_timeout,
            load_state_timeout=averaging.load_state_timeout,
            auxiliary=auxiliary,
            averager_opts=averager_options(recipe),
            description=replace(self.peer.description, device=device_in_words(recipe, self.compute)),
            fingerprint=self.peer.fingerprint,
            **mode_options(recipe),
            **timing_options(recipe, computes=self.peer.role == "trainer"),
        )

    def _frozen_options(self, digest: str) -> dict[str, Any]:
        """Weights that come from other peers are kept only if the user's limit for the disk has room for them."""
        recipe, home = self.peer.recipe, self.peer.home.path
        enough = room_for(self.peer.limits, recipe, home) > stored_bytes(recipe, self.model)
        if self.peer.role == "auxiliary":
            return {"frozen_digest": digest}
        frozen = run_weights(recipe, self.model, home if enough else None, self.compute.device)
        if recipe.adapter is not None:
            remember_base(recipe, self.model, frozen, home)
        return {"frozen_parameters": frozen}

    def resume_own(self) -> None:
        """Goes on from the newest checkpoint in this peer's home, unless a peer is there that is as far.

        To be called before the run is joined; if others begin from other checkpoints at the same moment, the rule for
        lineages decides. If a checkpoint cannot be read, the one before it is taken. Raises CheckpointError if none of
        them can be used and no peer is there that hands out the run's state.
        """
        found = checkpoints_below(self.peer.home.path, self.peer.recipe.run_id)
        if not found:
            self._hear_of_earlier_life()
            return
        kept = f"a checkpoint of epoch {epoch_of(found[0])} is here; asking whether another peer is further"
        self.peer.events.emit(Noticed("info", kept))
        elsewhere = self.optimizer.call(lambda core: core.succession.furthest())
        if elsewhere is not None and elsewhere >= epoch_of(found[0]):
            return
        problems = []
        for place in found:
            try:
                self.restore(load_checkpoint(place, self.peer.recipe.run_id))
            except (CheckpointError, ValueError) as error:
                problems.append(str(error))
                self.peer.events.emit(Noticed("warning", f"this peer cannot go on from {place}: {error}"))
            else:
                self.peer.events.emit(Noticed("info", f"going on from epoch {epoch_of(place)}, saved at {place}"))
                return
        if elsewhere is None:
            raise CheckpointError(
                f"{problems[0]}. This peer would begin the run anew beside its checkpoints in {self.peer.home.path}: "
                "move them away if it should, or give the run another run_id"
            )

    def _hear_of_earlier_life(self) -> None:
        """If an earlier process of this home was further and left no checkpoint, others may hold the run's state: notes
        that."""
        peer = self.peer
        with suppress(JournalError), peer.journal.read() as reader:
            last = reader.epochs(peer.recipe.run_id, limit=1)
            if last and remembered(peer.home.path):
                heard = Heard(last[0].epoch, f"the journal in {peer.home.path}", peer.dht.clock.now())
                self.optimizer.call(lambda core: core.catch_up.note_heard(heard, begins_anew=peer.begins_anew))
                ends = [end for end in (self.last_epoch(), self.evaluations.kept_end) if end is not None]
                if ends and heard.epoch >= min(ends) and not peer.begins_anew:
                    text = (
                        f"this run ended at epoch {min(ends)}, with this peer: there is nothing left to do. It waits "
                        "only for somebody who still holds the model; Ctrl-C ends that"
                    )
                    peer.events.emit(Noticed("info", text))

    def restore(self, checkpoint: Checkpoint) -> None:
        """Goes on from the checkpoint. Raises CheckpointError or ValueError if it is of another model."""
        self.optimizer.call(lambda core: core.replica.alone(lambda: checkpoint.restore_model(self.model)))
        self._take_over(checkpoint)

    def _take_over(self, checkpoint: Checkpoint) -> None:
        """Takes over all but the weights, which are loaded, with the settings of the recipe. Says which settings have
        changed."""
        run_id = self.peer.recipe.run_id
        state, differences = by_recipe(self.peer.recipe, checkpoint, self._settings)
        self.optimizer.load_state_dict(state)
        self.resumed = checkpoint.path
        if checkpoint.run_id != run_id:
            text = (
                f"{run_id} begins at epoch {checkpoint.epoch}, with the weights and the optimizer's statistics of the "
                f"run {checkpoint.run_id} ({checkpoint.path}), as a run of its own"
            )
            self.peer.events.emit(Noticed("info", text))
            write_file(self.peer.home.path / BEGAN, f"epoch {checkpoint.epoch} of the run {checkpoint.run_id}".encode())
        if self.peer.recipe.ema_decay and not any(AVERAGE in each for each in state["state"].values()):
            text = f"{checkpoint.path} holds no averaged weights: the average begins after its next epoch"
            self.peer.events.emit(Noticed("info", text))
        if differences:
            self.peer.events.emit(Noticed("info", f"the recipe's settings count: {differences}"))

    def last_epoch(self) -> int | None:
        """Returns the epoch after which the run ends: the recipe's, or an earlier one that its evaluator has named;
        None: there is none. Any thread may call it."""
        ends = [end for end in (self.peer.recipe.max_epochs, self.evaluations.ends_at) if end is not None]
        return min(ends, default=None)

    def has_ended(self) -> bool:
        """Whether this peer has reached that epoch."""
        last = self.last_epoch()
        return last is not None and self.optimizer.local_epoch >= last

    def linger(self, seconds: float = 30.0) -> None:
        """Stays at the end of a run, for peers that are still behind. 0: only says that it stays."""
        self.optimizer.linger(self.optimizer.local_epoch, seconds)

    def close(self) -> None:
        async def settle() -> Attestation | None:
            """Returns this peer's contribution as a peer that keeps count has signed it, if one answers at once."""
            standing = await self.accounts.standing()
            await self.accounts.close()
            return standing

        if self.peer.dht.is_alive() and (standing := self.peer.dht.run_coroutine(settle())) is not None:
            self.peer.stand(standing)
        self.optimizer.shutdown()


def keep_accounts(peer: RunPeer, optimizer: Optimizer) -> ContributionReader:
    """From now on learns what each peer has given: monitors and trainers that write checkpoints keep count, others ask
    them."""
    recipe = peer.recipe

    async def begin(dht: DHT, node: DHTNode) -> ContributionReader:
        around = RunView(
            node=node,
            identity=dht.identity,
            run_id=recipe.run_id,
            run=peer.digest,
            own=optimizer.report,
            others=optimizer.peers,
            answers=optimizer.directory.is_there,
            clock=peer.journal.clock,
        )
        counts = peer.role == "monitor" or (peer.role == "trainer" and recipe.checkpoint.every_epochs > 0)
        accounts = ContributionKeeper(around, peer.journal) if counts else ContributionReader(around)
        await accounts.start()
        return accounts

    return peer.dht.run_coroutine(begin)


def keep_evaluations(peer: RunPeer, optimizer: Optimizer) -> RunEvaluations:
    """From now on hears what is measured of the run's model. The journal has what was before this process began."""
    earlier: Sequence[Evaluated] = ()
    with suppress(JournalError), peer.journal.read() as reader:
        earlier = reader.evaluations(peer.recipe.run_id)

    directory, settings = optimizer.directory, peer.recipe.evaluation

    def reports() -> Mapping[PeerID, PeerReport]:
        return {**directory.others, peer.peer_id: directory.describe()}

    def report_end(epoch: int) -> None:
        if not optimizer.auxiliary:
            optimizer.core.metrics.ends = epoch

    # the digest is kept too: a home may see other runs, or this one with more patience
    kept, ended = peer.home.path / ENDS, None
    with suppress(OSError, ValueError):
        epoch, _, digest = kept.read_text(encoding="ascii").partition(" ")
        ended = int(epoch) if digest == peer.digest else None

    evaluations = RunEvaluations(
        settings,
        peer.peer_id,
        reports,
        lambda: optimizer.claims.mates.known,
        directory.is_there,
        peer.events.emit,
        report_end,
        lambda epoch: peer.home.leave(ENDS, f"{epoch} {peer.digest}"),
        earlier,
        ended,
    )
    directory.readers.append(evaluations.look)
    return evaluations


def owners_word(recipe: Recipe, run_key: str) -> SignedByOwner:
    """Returns a function that says whether the run's owner has signed a position, with parameters of this hash."""
    key, digest = PeerID.parse(run_key), digest_of(recipe)

    def signed_by_owner(position: LineagePosition, state: bytes, signature: bytes) -> bool:
        return is_owners_position(key, signature, digest, position.epoch, position.samples, position.lineage, state)

    return signed_by_owner


def compute_of(recipe: Recipe, role: Role) -> Compute:
    """Returns the device on which a peer holds its model. Raises RecipeError for a trainer without the device that it
    asks for."""
    # A quantized base cannot be moved, so a monitor evaluates where a trainer would compute.
    computes = role == "trainer" or (role == "monitor" and is_quantized(recipe))
    return choose_compute(recipe) if computes else Compute(torch.device("cpu"))


def device_in_words(recipe: Recipe, compute: Compute) -> str:
    """The devices of this peer as others see them, for example "4 × cuda (bfloat16)"."""
    count = recipe.local.site.processes
    return str(compute) if count == 1 else f"{count} × {compute.kind}"


def averager_options(recipe: Recipe) -> dict[str, Any]:
    """Returns the recipe's options of the averager itself."""
    averaging = recipe.averaging
    return {
        "part_size_bytes": averaging.part_size_bytes,
        "proceed_alone": averaging.proceed_alone,
        "trust": recipe.trust,
        "seats_per_network": averaging.seats_per_network,
        "aggregator": make_aggregator(recipe.aggregator, averaging.aggregator),
        "max_share": recipe.averaging.max_share,
        "audit": averaging.audit,
        "bandwidth": recipe.local.bandwidth,
        "target_group_size": averaging.target_group_size,
    }


def mode_options(recipe: Recipe) -> dict[str, Any]:
    """Returns the recipe's options about what every peer averages, and in which form it travels."""
    averaging, compression = recipe.averaging, recipe.compression
    return {
        "grad_averager": None if recipe.local_updates.enabled else grad_averager(recipe.gradient_averaging),
        "outer": outer_steps(recipe),
        "grad_compression": COMPRESSIONS[compression.gradients],
        "state_averaging_compression": COMPRESSIONS[compression.state_averaging],
        "load_state_compression": COMPRESSIONS[compression.state_download],
        "average_state_every": averaging.average_state_every,
        "average_opt_statistics": averaging.average_opt_statistics,
    }


def timing_options(recipe: Recipe, *, computes: bool) -> dict[str, Any]:
    """Returns for which work a peer does not wait. A peer that computes nothing has nothing to do meanwhile, so it
    waits and is up to date at once."""
    return {
        "offload_optimizer": computes and recipe.offloaded,
        "delay_optimizer_step": computes and (recipe.delay.step or recipe.outer.takes_steps),
        "delay_grad_averaging": computes and (recipe.delay.grad_averaging or recipe.outer.takes_steps),
        "delay_state_averaging": computes and recipe.delay.state_averaging,
    }


def grad_averager(settings: GradientAveragingSettings) -> Callable[..., Any]:
    """Returns the averager that the Optimizer takes for the recipe's method."""
    if settings.method == "plain":
        return GradientAverager
    if settings.method == "topk":
        return partial(Sparse, k=settings.k, bits=settings.bits, decay=settings.decay)
    kind = {"powersgd": PowerSGDGradientAverager, "poweref": PowerEFGradientAverager}[settings.method]
    return kind.get_factory(averager_rank=settings.rank, min_compression_ratio=settings.min_compression_ratio)


def make_aggregator(name: str, settings: AggregatorSettings) -> Aggregator:
    """Returns what makes one average of the members' tensors in a round."""
    match name:
        case "median":
            return Median()
        case "trimmed_mean":
            return TrimmedMean(settings.trim)
        case "centered_clip":
            return CenteredClip(settings.radius, settings.iterations)
        case _:
            return Mean(settings.gate)
