"""The monitor: takes part in every round with nothing of its own, so that it always holds the state of the run."""

from __future__ import annotations

import threading

from swarmcli.events import Noticed
from swarmcli.roles.checkpoints import BackgroundCheckpoints
from swarmcli.roles.collaboration import LINGER_SECONDS, Collaboration
from swarmcli.roles.peer import RunPeer
from swarmcli.roles.watch import RunWatch


def run_monitor(
    peer: RunPeer, watch: RunWatch, stop: threading.Event, *, resume: str | None = None, leave_when_done: bool = False
) -> None:
    """Follows the run, writes its checkpoints and hands out its state, until told to stop.

    After the last epoch it goes on to serve state and dashboard, for those who come late; with `leave_when_done` only
    for a little while, as trainers do. Raises CheckpointError, at the very end, if the last checkpoint could not be
    written.
    """
    collaboration = Collaboration(peer, resume=resume)
    optimizer, recipe = collaboration.optimizer, peer.recipe
    optimizer.give_up_when(stop.is_set)
    watch.follow(optimizer)
    try:
        if resume is None:
            collaboration.resume_own()
        with BackgroundCheckpoints.of_run(collaboration, yields=False) as checkpoints:
            while not stop.is_set() and (recipe.max_epochs is None or optimizer.local_epoch < recipe.max_epochs):
                optimizer.step(batch_size=0)
                checkpoints.look()
            finished = not stop.is_set()
            if finished:
                watch.state = "finished"
        peer.saved = checkpoints.outcome
        if finished:
            leaving = "leaving" if leave_when_done else "Ctrl-C to leave"
            peer.events.emit(Noticed("info", f"the run has finished; {checkpoints.outcome}; {leaving}"))
            optimizer.linger(optimizer.local_epoch, LINGER_SECONDS if leave_when_done else 0.0)
            if not leave_when_done:
                stop.wait()
        checkpoints.require()
        peer.saved = checkpoints.outcome
    finally:
        peer.leave_summary(optimizer)
        collaboration.close()
