"""The life of a process in a run, from its model to its goodbye.

A trainer computes gradients; a monitor follows and computes none, so that it always holds the state of the run; an
auxiliary adds up parts of gradients for others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from swarmcli import startup
from swarmcli.events import Noticed
from swarmcli.peer.checkpoints import saving
from swarmcli.peer.collaboration import Collaboration
from swarmcli.peer.pausing import Pauses
from swarmcli.peer.peer import RunPeer
from swarmcli.peer.reading import reading_together
from swarmcli.run.watch import RunWatch, clock_alarm
from swarmcli.training import STREAM, CollaborativeOptimizer, LoopResult, LoopSettings, Task, TrainingLoop, stream_seed
from swarmcli.training.resumed import Resume


class Steps(CollaborativeOptimizer, Protocol):
    """Takes the loop's steps: the Optimizer itself, or a site around it."""

    def note_loss(self, loss: float, samples: float) -> None: ...
    def load_state_from_peers(self) -> bool: ...


def run_trainer(
    peer: RunPeer,
    watch: RunWatch,
    stop: threading.Event,
    *,
    resume: Resume | None = None,
    task: Task | None = None,
) -> LoopResult:
    """Trains. Afterwards the home's summary says what was done, also if training ended by an error.

    At the end, however it came, a trainer writes a checkpoint into its home, unless a peer that stays holds as much;
    `peer.saved` says which. At the last epoch it stays a little while for peers that missed the last round. `task`: see
    Collaboration. Raises CheckpointError, at the very end, if the checkpoint could not be written.
    """
    with _holding_the_state(peer, watch, stop, resume, task) as collaboration:
        optimizer = collaboration.optimizer
        with saving(collaboration, stop.is_set, yields=True) as checkpoints:
            with pauses_of(collaboration, stop, checkpoints.look) as pauses:
                come_into_step(collaboration, optimizer)
                result = train(
                    collaboration,
                    optimizer,
                    stop,
                    on_step=checkpoints.look,
                    rest=pauses.rest,
                    last_epoch=collaboration.last_epoch,
                )
            if result.reason == "max_epochs":
                watch.state = "finished"
        peer.saved = checkpoints.outcome
        if result.reason == "max_epochs":
            collaboration.linger()
        checkpoints.require()
        peer.saved = checkpoints.outcome
        return result


@contextmanager
def _holding_the_state(
    peer: RunPeer, watch: RunWatch, stop: threading.Event, resume: Resume | None, task: Task | None
) -> Iterator[Collaboration]:
    """The model and optimizer of a trainer or a monitor, from the checkpoint that `resume` names or else its own newest
    one. At the end the peer writes its summary and says goodbye."""
    collaboration = Collaboration(peer, resume=resume, task=task)
    collaboration.optimizer.core.catch_up.gives_up = stop.is_set
    with _following(collaboration, watch):
        if resume is None:
            collaboration.resume_own()
        yield collaboration


@contextmanager
def _following(collaboration: Collaboration, watch: RunWatch) -> Iterator[None]:
    startup.over()
    watch.follow(collaboration.optimizer, collaboration.evaluations)
    try:
        yield
    finally:
        collaboration.peer.leave_summary(collaboration.optimizer)
        collaboration.close()


def pauses_of(
    collaboration: Collaboration, stop: threading.Event, after_step: Callable[[], object] = lambda: None
) -> Pauses:
    """Lets the peer of this collaboration pause, and leave when its user asks for it."""
    peer = collaboration.peer
    return Pauses(
        peer.activity,
        collaboration.optimizer,
        stop,
        last_epoch=collaboration.last_epoch,
        after_step=after_step,
        lose=partial(setattr, peer.summary, "why_lost"),
    )


def come_into_step(collaboration: Collaboration, steps: Steps) -> None:
    """Joins the run, and downloads its state if this peer has another."""
    if wrong := clock_alarm(collaboration.peer.dht.clock.uncorrected):
        collaboration.peer.events.emit(Noticed("warning", wrong))
    steps.load_state_from_peers()
    collaboration.optimizer.call(lambda core: collaboration.evaluations.look())
    if collaboration.has_ended():
        last = collaboration.last_epoch()
        text = f"the run is finished, at its last epoch, {last}: nothing is left to do (a new run needs another run_id)"
        collaboration.peer.events.emit(Noticed("info", text))


def train(
    collaboration: Collaboration,
    steps: Steps,
    stop: threading.Event,
    *,
    on_step: Callable[[], object] = lambda: None,
    rest: Callable[[], bool] = lambda: False,
    last_epoch: Callable[[], int | None] = lambda: None,
) -> LoopResult:
    """Computes until `stop` is set, the data ends or the run ends. `rest`, `last_epoch`: see TrainingLoop."""
    peer, recipe = collaboration.peer, collaboration.peer.recipe

    pace = peer.pace.share

    def after_step() -> None:
        nonlocal pace
        peer.processors.take()
        if (share := peer.pace.share) != pace:
            factor = share / pace  # told at once, so others need not learn the new pace step by step
            collaboration.optimizer.call(lambda core: core.tracker.performance_ema.scale(factor))
            pace = share
        on_step()

    peer.processors.take()
    loop = TrainingLoop(
        collaboration.task,
        collaboration.model,
        steps,
        LoopSettings(
            stream_seed(recipe.seed, peer.peer_id),
            recipe.accumulation_steps,
            stream_file=peer.home.path / STREAM,
            compile=recipe.local.torch_compile,
        ),
        compute=collaboration.compute,
        pace=peer.pace,
        on_loss=steps.note_loss,
        on_step=after_step,
        rest=rest,
        last_epoch=last_epoch,
    )
    with reading_together(collaboration):
        return loop.run(stop)


def run_monitor(
    peer: RunPeer,
    watch: RunWatch,
    stop: threading.Event,
    *,
    resume: Resume | None = None,
    task: Task | None = None,
    leave_when_done: bool = False,
) -> None:
    """Follows the run, writes its checkpoints and hands out its state, until told to stop.

    After the last epoch it goes on serving state and dashboard, for peers that come late; with `leave_when_done` only a
    little while, as trainers do. Raises CheckpointError, at the very end, if the last checkpoint could not be written.
    """
    with _holding_the_state(peer, watch, stop, resume, task) as collaboration:
        optimizer = collaboration.optimizer
        with (
            saving(collaboration, stop.is_set, yields=False) as checkpoints,
            pauses_of(collaboration, stop) as pauses,
        ):
            while not (stop.is_set() or collaboration.has_ended()):
                if not pauses.rest():
                    optimizer.step(batch_size=0)
                checkpoints.look()
            finished = not stop.is_set()
            if finished:
                watch.state = "finished"
        peer.saved = checkpoints.outcome
        if finished:
            leaving = "leaving" if leave_when_done else "Ctrl-C to leave"
            peer.events.emit(Noticed("info", f"the run has finished; {checkpoints.outcome}; {leaving}"))
            if leave_when_done:
                collaboration.linger()
            else:
                collaboration.linger(0.0)
                while not stop.wait(1.0):  # waits in pieces: on Windows Ctrl-C does not end a wait
                    pass
        checkpoints.require()
        peer.saved = checkpoints.outcome


def run_auxiliary(peer: RunPeer, watch: RunWatch, stop: threading.Event) -> None:
    """Helps in every round until told to stop, or until the run has reached its last epoch."""
    collaboration = Collaboration(peer, auxiliary=True)
    with _following(collaboration, watch), pauses_of(collaboration, stop) as pauses:
        while not (stop.is_set() or collaboration.has_ended()):
            if not pauses.rest():
                collaboration.optimizer.step()
