"""Peers behind routers train one model, whatever flags they were started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks._homes import DUAL_STACK, MASQUERADE, RANDOM, Internet, Machine
from swarmcli.cli.processes import Child, Children
from tests.end_to_end.swarm import Swarm
from tests.end_to_end.test_run import ENDLESS

pytestmark = pytest.mark.homes

# Strangers train on texts that every computer has.
STDLIB = ("datasets:\n  - source: files\n    path: text\n", "datasets:\n  - source: stdlib\n")
TOGETHER = 3  # epochs that every trainer has to end to show that it works


class Strangers(Swarm):
    """A run whose peers are in homes of their own, and listen wherever their computers can be reached."""

    def __init__(self, directory: Path, children: Children, *, max_epochs: int, target: int) -> None:
        super().__init__(directory, children, max_epochs=max_epochs, target=target, host="null")
        self.recipe.write_text(self.recipe.read_text().replace(*STDLIB))

    def join_by_link(self, verb: str, name: str, link: str, machine: Machine) -> Child:
        """Starts a peer as somebody does who has nothing but a link; the consent is kept in a data directory of its
        own."""
        own = {"XDG_DATA_HOME": str(self.directory / f"data of {name}")}
        return self.start(verb, name, "--yes", recipe=link, prefix=machine.prefix, environment=own)

    def link(self, name: str) -> str:
        """The link that a peer has given out."""
        return (self.home(name) / "link").read_text().strip()

    def wait_for_epochs_of(self, peers: int, *trainers: Child) -> None:
        """Waits until each trainer has ended TOGETHER more epochs with the averages of at least so many peers."""
        before = {child.name: self.epoch(child.name) for child in trainers}

        def together() -> bool:
            return all(
                sum(each.epoch > epoch and each.peers >= peers for each in self.epochs(name)) >= TOGETHER
                for name, epoch in before.items()
            )

        self.wait(together, f"{peers} trainers average", *trainers)


def test_strangers_behind_routers_train_from_a_link_whatever_happens(
    internet: Internet, tmp_path: Path, children: Children
) -> None:
    """Four join through a public auxiliary, which relays; a fifth gets the state from one of them; the relay is killed
    and another one takes its place; somebody's outer address changes."""
    run = Strangers(tmp_path, children, max_epochs=ENDLESS, target=1024)
    relay = run.start_contact("aux", "relay", prefix=internet.machine("relay").prefix)
    link = run.link("relay")
    double = internet.router("double", behind=internet.router("carrier", lan="100.64.0"))
    routers = [internet.router("north", MASQUERADE), internet.router("east", RANDOM), double]
    routers.append(internet.router("south", DUAL_STACK))
    trainers = [run.join_by_link("join", each.name, link, each.machine(each.name)) for each in routers]
    run.wait_for_epochs_of(4, *trainers)
    spare = run.join_by_link("aux", "spare", link, internet.machine("spare"))

    west = internet.router("west", MASQUERADE).machine("west")
    trainers.append(run.join_by_link("join", "west", link, west))
    run.wait_for_epochs_of(5, *trainers)
    relay.kill()
    run.wait_for_epochs_of(5, *trainers)
    routers[0].move()
    run.wait_for_epochs_of(5, *trainers)
    run.end_in_step(*trainers)
    assert run.summary("west")["downloads"] >= 1
    spare.ask_to_stop()
    run.wait_for_end(spare)
