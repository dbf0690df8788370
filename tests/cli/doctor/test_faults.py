"""Things that were broken on purpose, each of which doctor names with what helps."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from swarmcli.cli.doctor import computer, homes, run
from swarmcli.cli.doctor.finding import Check, Context, Finding, findings
from swarmcli.cli.doctor.verb import CHECKS
from swarmcli.clock import Clock
from swarmcli.journal import JOURNAL_NAME
from swarmcli.machine.registry import LocalPeer, LocalPeers
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.loop_thread import LoopThread
from swarmcli.network.transports.tcp.transport import TCPTransport
from swarmcli.peer.home import Home
from swarmcli.peer.joining import join_run
from swarmcli.recipe import Link, parse_link
from swarmcli.recipe.run_key import RunKey
from swarmcli.recipe.ticket import Ticket
from tests.cli.doctor.faults import OTHER, home_with, listener, nobody, speaks_http, speaks_version_9
from tests.recipe.recipes import SMALL, small

PEER = Identity.from_seed(1).peer_id


@dataclass
class World:
    """A computer on which something may be broken."""

    here: Path
    set: pytest.MonkeyPatch
    until: ExitStack
    context: Context

    @property
    def data(self) -> Path:
        return self.here / "data"

    def config(self, text: str) -> None:
        (self.here / "config.yaml").write_text(text)

    def recipe(self, *overrides: str, text: str = SMALL) -> None:
        (self.here / "small.yaml").write_text(text)
        self.context.recipe = small(f"output_dir={self.here}/runs", *overrides, text=text, directory=self.here)

    def home(self, **how: object) -> Path:
        home = home_with(self.data, **how)  # type: ignore[arg-type]
        assert homes.find_homes(self.context) == [home]
        return home


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with ExitStack() as until:
        yield World(tmp_path, monkeypatch, until, Context())


def found_by(look: Callable[[Context], Iterable[Finding]], world: World) -> list[Finding]:
    """As `swarm doctor` runs this check."""
    return list(findings(next(check for check in CHECKS if check.look == look), world.context))


def a_device_that_fails(world: World) -> None:
    def fails(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image is available for execution on the device")

    world.set.setattr(torch, "mm", fails)


def a_full_disk_of_a_running_peer(world: World) -> None:
    """A disk of its own: an external one, or a small partition."""
    home = world.here / "external" / "trainer-1"
    home.mkdir(parents=True)
    stat, usage = Path.stat, shutil._ntuple_diskusage
    world.until.enter_context(LocalPeers().entered(LocalPeer.here("trainer", "a-run", home)))

    def of_another_disk(path: Path, **how: bool) -> object:
        found = stat(path, **how)
        return SimpleNamespace(st_mode=found.st_mode, st_dev=-1) if path == home else found

    world.set.setattr(Path, "stat", of_another_disk)
    world.set.setattr(shutil, "disk_usage", lambda place: usage(10**12, 0, 10**7 if place == home else 10**12))


def a_directory_of_others(world: World) -> None:
    world.data.mkdir()
    world.set.setattr(os, "access", lambda place, mode: Path(place) != world.data)


def an_unknown_key(world: World) -> None:
    (world.here / "small.yaml").write_text(SMALL.replace("sequence_len", "sequence_length"))
    world.context.target = "small.yaml"


def link_of(ticket: Ticket | None = None) -> str:
    return str(Link(PEER, ("203.0.113.7:1",), "small", "a" * 32, ticket))


def an_ended_invitation(world: World) -> None:
    invitation = RunKey(OTHER.private_key).invite_bearer("a" * 32, PEER, 1_000_000)
    world.context.target = link_of(Ticket.for_bearer(OTHER.peer_id, *invitation))


def a_damaged_journal(world: World) -> None:
    file = world.home() / JOURNAL_NAME
    data = bytearray(file.read_bytes())
    data[4096:20_000] = b"\xff" * (20_000 - 4096)
    file.write_bytes(data)


def a_home_of_another_user(world: World) -> None:
    world.home()
    another = os.geteuid() + 1
    world.set.setattr(os, "geteuid", lambda: another)


def contact(world: World, address: str, peer: PeerID = PEER) -> None:
    world.context.link = Link(peer, (address.removeprefix("tcp://").partition("/")[0],), "small", "a" * 32)


def a_name_that_leads_nowhere(world: World) -> None:
    def fails(host: str, *rest: object, **more: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    world.set.setattr(socket, "getaddrinfo", fails)
    contact(world, "tcp://peer.example.org:31330")


def no_network(world: World) -> None:
    async def unreachable(*_: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    world.set.setattr(asyncio.SelectorEventLoop, "sock_connect", unreachable)
    contact(world, "tcp://192.0.2.1:9")


def another_version(world: World) -> None:
    world.context.peers = [world.until.enter_context(listener(speaks_version_9))]
    world.recipe()


def a_clock_two_hours_behind(world: World) -> None:
    """Of a link that this computer has not joined: nothing else is asked of its contact."""
    thread = LoopThread.acquire()
    world.until.callback(thread.release)
    endpoint = Endpoint(TCPTransport(OTHER, host="127.0.0.1"), clock=Clock(lambda: time.time() + 7200.0))
    thread.run(endpoint.start())
    world.until.callback(lambda: thread.run(endpoint.close()))
    contact(world, endpoint.addresses[0], OTHER.peer_id)


def a_port_that_is_filtered(world: World) -> None:
    """What is sent there is dropped, as by a firewall: a full queue of connections does the same."""
    world.set.setattr(run, "CONTACT_SECONDS", 0.5)
    server = world.until.enter_context(closing(socket.socket()))
    server.bind(("127.0.0.1", 0))
    server.listen(0)
    for _ in range(4):
        waiting = world.until.enter_context(closing(socket.socket()))
        waiting.setblocking(False)
        waiting.connect_ex(server.getsockname())
    contact(world, f"tcp://127.0.0.1:{server.getsockname()[1]}")


class Fault(NamedTuple):
    name: str
    break_it: Callable[[World], object]
    look: Callable[[Context], Iterable[Finding]]
    named: str  # words of the line that names it …
    fix: str  # … and of what helps
    outcome: str = "FAIL"


FULL = shutil._ntuple_diskusage(10**12, 10**12, 10**7)
MISSING = ["no-such-package>=1", "numpy>=2"]
CLOSED = ("access=invite", f"run_key={OTHER.peer_id}", "network.initial_peers=[tcp://127.0.0.1:1]")
# fmt: off
FAULTS = [
    Fault("a missing package", lambda world: world.set.setattr(metadata, "requires", lambda name: MISSING),
          computer.check_python, "no-such-package is missing", '-m pip install "no-such-package>=1"'),
    Fault("a wrong product", lambda world: world.set.setattr(torch, "mm", lambda a, b: (a @ b).roll(1, 0)),
          computer.check_torch, "float32: a product of matrices comes out wrong", "do not train on it"),
    Fault("a device that fails", a_device_that_fails, computer.check_torch, "no kernel image", "update driver"),
    Fault("a full disk", lambda world: world.set.setattr(shutil, "disk_usage", lambda place: FULL),
          computer.check_disk, "disk: 10 MB free", "make room there"),
    Fault("a full disk of a running peer", a_full_disk_of_a_running_peer,
          computer.check_disk, "external/trainer-1 (directory of a running peer)", "another --home"),
    Fault("a directory of others", a_directory_of_others,
          computer.check_disk, "you may not write", "set SWARM_DATA_DIR"),
    Fault("a clock two hours behind", a_clock_two_hours_behind,
          run.check_contacts, "clock: this computer's clock is 2.0 h behind the contacts'", "set the clock"),
    Fault("an unknown key", an_unknown_key, run.check_recipe, "sequence_length", "sequence_len"),
    Fault("an ended invitation", an_ended_invitation,
          run.check_recipe, "the invitation of this link held until", "swarm invite"),
    Fault("no invitation", lambda world: world.recipe(*CLOSED), run.check_contacts, "is closed", "`swarm invite`"),
    Fault("a key that others read", lambda world: (world.home() / "identity.key").chmod(0o644),
          homes.check_homes, "mode 0644", "chmod 600"),
    Fault("a damaged journal", a_damaged_journal, homes.check_homes, "journal: ", "mv "),
    Fault("files of another user", a_home_of_another_user,
          homes.check_homes, "journal.sqlite belongs to another user (id ", "run: sudo chown -R"),
    Fault("a name that leads nowhere", a_name_that_leads_nowhere, run.check_contacts,
          "name: peer.example.org cannot be resolved: Name or service", "name server"),
    Fault("nobody there", lambda world: contact(world, world.until.enter_context(nobody())),
          run.check_contacts, "TCP: nothing listens there", "ask for another link"),
    Fault("a port that is filtered", a_port_that_is_filtered,
          run.check_contacts, "TCP: ", "if no contact answers, a firewall"),
    Fault("no network", no_network,
          run.check_contacts, "TCP: Network is unreachable", "this computer has no network"),
    Fault("another program", lambda world: contact(world, world.until.enter_context(listener(speaks_http))),
          run.check_contacts, "TCP is well; TLS: ", "another program answers there"),
    Fault("another peer", lambda world: contact(world, world.until.enter_context(listener(speaks_version_9))),
          run.check_contacts, "TCP and TLS are well; identity: ", "ask for a new link"),
    Fault("another version", another_version,
          run.check_contacts, "TCP and TLS and identity are well; version: ", "update the older one"),
]
# fmt: on


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_what_was_broken_is_named_with_what_helps(fault: Fault, world: World) -> None:
    fault.break_it(world)
    found = found_by(fault.look, world)
    named = [f"{each.check}: {each.text}" for each in found if each.outcome == fault.outcome]
    fixes = [each.fix for each in found if each.outcome == fault.outcome]
    assert any(fault.named in text for text in named), found
    assert any(fault.fix in text for text in fixes), found
    assert all(each.fix for each in found if each.outcome in ("WARN", "FAIL"))


def test_a_peer_of_the_run_is_well_and_one_with_another_recipe_is_not(world: World) -> None:
    recipe = small("local.host=127.0.0.1", f"output_dir={world.here}", "seed=4", directory=world.here)
    with join_run(recipe, "monitor", Home.at(world.here / "monitor")) as peer:
        link = peer.link()
        assert link is not None
        world.context.link = parse_link(str(link))
        found = found_by(run.check_contacts, world) + found_by(run.check_offer, world)
        assert [each.outcome for each in found] == ["OK"] * len(found) and world.context.reached
        assert {each.check for each in found} >= {"contact", "recipe"}
        assert found[0].text.startswith(f"{link.places[0]} ({peer.peer_id.short}) answers in ")
        world.context.link = replace(world.context.link, fingerprint="a" * 32)
        (another,) = found_by(run.check_offer, world)
        assert another.outcome == "FAIL" and "not the one that the link speaks of" in another.text and another.fix
        world.context = Context(peers=link.addresses)
        world.recipe("seed=5")
        (other,) = (each for each in found_by(run.check_contacts, world) if each.check == "contact")
        assert other.outcome == "FAIL" and "recipe: " in other.text and "seed" in other.text and other.fix


def test_a_check_that_raises_has_failed_and_one_that_hangs_too() -> None:
    def raises(context: Context) -> Iterator[Finding]:
        yield Finding("odd", "OK", "so far")
        raise ZeroDivisionError("nobody thought of that")

    before, failed = findings(Check("odd", raises), Context())
    assert before.outcome == "OK" and failed.outcome == "FAIL" and "nobody thought of that" in failed.text
    with ExitStack() as until:
        end = threading.Event()
        until.callback(end.set)
        hanging = Check("stuck", lambda context: [Finding("stuck", "OK", str(end.wait()))], 0.01)
        (found,) = findings(hanging, Context())
    assert found.outcome == "FAIL" and "no answer" in found.text and found.fix
