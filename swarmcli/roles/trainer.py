"""The trainer: computes gradients of its own stream of data until the run has ended or it is told to stop."""

from __future__ import annotations

import threading

from swarmcli.events import Noticed
from swarmcli.roles.collaboration import LINGER_SECONDS, Collaboration
from swarmcli.roles.peer import RunPeer
from swarmcli.roles.watch import RunWatch
from swarmcli.training import CheckpointStore, LoopResult, LoopSettings, TrainingLoop, stream_seed


def run_trainer(peer: RunPeer, watch: RunWatch, stop: threading.Event, *, resume: str | None = None) -> LoopResult:
    """Trains; what was done stands in the home's summary afterwards, also when training ended by an error.

    A trainer that reached the last epoch writes the final checkpoint into its home and stays a little while for
    those who missed the last round.
    """
    collaboration = Collaboration(peer, resume=resume)
    optimizer, recipe = collaboration.optimizer, peer.recipe
    watch.follow(optimizer)
    try:
        loop = TrainingLoop(
            collaboration.task,
            collaboration.model,
            optimizer,
            LoopSettings(stream_seed(recipe.seed, peer.peer_id), recipe.accumulation_steps, recipe.max_epochs),
            compute=collaboration.compute,
            on_loss=optimizer.note_loss,
        )
        optimizer.load_state_from_peers()
        if recipe.max_epochs is not None and optimizer.local_epoch >= recipe.max_epochs:
            peer.events.emit(Noticed("info", f"this run has reached its last epoch, {recipe.max_epochs}, already"))
        result = loop.run(stop)
        if result.reason == "max_epochs":
            watch.state = "finished"
            store = CheckpointStore(
                peer.home.path / "checkpoints", recipe.run_id, keep=recipe.checkpoint.keep, events=peer.events
            )
            store.write(collaboration.model, optimizer.state_dict(), optimizer.local_epoch)
            optimizer.linger(optimizer.local_epoch, LINGER_SECONDS)
        return result
    finally:
        peer.leave_summary(optimizer)
        collaboration.close()
