"""What the examples share: the command line, and a line of text for each epoch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from swarmcli import DHT
from swarmcli.errors import SwarmError
from swarmcli.events import EpochAdvanced, Event

Say = Callable[[str], object]


def arguments(about: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", default=[], help="address of a peer that is there already")
    parser.add_argument("--host", default="127.0.0.1", help="the interface to listen on")
    parser.add_argument("--seed", type=int, default=0, help="of this peer's data: another one for each peer")
    parser.add_argument("--batches", type=int, help="after so many batches this peer leaves; usually on Ctrl-C")
    return parser.parse_args()


def invite(dht: DHT, say: Say) -> None:
    """Tells how others join."""
    say(f"others join with: --peer {dht.get_visible_addresses()[0]}")


def tell_epochs(dht: DHT, say: Say, every: int = 1) -> None:
    """From now on says a line at the end of each epoch, or of every `every`-th. Peers that are in step say the same
    lineage."""

    def tell(event: Event) -> None:
        if isinstance(event, EpochAdvanced) and event.epoch % every == 0:
            say(f"epoch {event.epoch}: {event.samples} samples of {event.peers} peers, lineage {event.lineage[:8]}")

    dht.events.subscribe(tell)


def run(train: Callable[[], object]) -> None:
    """Runs the training until it ends, or until Ctrl-C. An error of the swarm, such as that nobody answers, ends the
    program with one line."""
    try:
        train()
    except KeyboardInterrupt:
        print("stopped")
    except SwarmError as error:
        sys.exit(f"stopped: {error}")
