"""The auxiliary: adds up parts of gradients for the trainers, and computes none."""

from __future__ import annotations

import threading

from swarmcli.roles.collaboration import Collaboration
from swarmcli.roles.peer import RunPeer
from swarmcli.roles.watch import RunWatch


def run_auxiliary(peer: RunPeer, watch: RunWatch, stop: threading.Event) -> None:
    """Helps in every round until told to stop, or until the run has reached its last epoch."""
    collaboration = Collaboration(peer, auxiliary=True)
    optimizer, last = collaboration.optimizer, peer.recipe.max_epochs
    watch.follow(optimizer)
    try:
        while not stop.is_set() and (last is None or optimizer.local_epoch < last):
            optimizer.step()
    finally:
        peer.leave_summary(optimizer)
        collaboration.close()
