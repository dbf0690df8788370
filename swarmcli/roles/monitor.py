"""The monitor: takes part in every round with nothing of its own, so that it always holds the state of the run."""

from __future__ import annotations

import threading

from swarmcli.roles.checkpoints import BackgroundCheckpoints, store_of
from swarmcli.roles.collaboration import Collaboration
from swarmcli.roles.peer import RunPeer
from swarmcli.roles.watch import RunWatch


def run_monitor(peer: RunPeer, watch: RunWatch, stop: threading.Event, *, resume: str | None = None) -> None:
    """Follows the run, writes its checkpoints and hands out its state, until told to stop.

    After the last epoch it goes on to serve state and dashboard, for those who come late.
    """
    collaboration = Collaboration(peer, resume=resume)
    optimizer, recipe, store = collaboration.optimizer, peer.recipe, store_of(collaboration)
    watch.follow(optimizer)
    try:
        with BackgroundCheckpoints(
            store, collaboration.model, optimizer, recipe.checkpoint.every_epochs
        ) as checkpoints:
            while not stop.is_set() and (recipe.max_epochs is None or optimizer.local_epoch < recipe.max_epochs):
                optimizer.step(batch_size=0)
                checkpoints.look()
        if not stop.is_set():
            watch.state = "finished"
            optimizer.linger(optimizer.local_epoch, 0.0)
            stop.wait()
    finally:
        peer.leave_summary(optimizer)
        collaboration.close()
