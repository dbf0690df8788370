"""Things that were broken on purpose, each of which doctor names with what helps."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
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

from swarmcli.checkpoints.layout import MODEL
from swarmcli.checkpoints.shelf import Shelf
from swarmcli.cli import service
from swarmcli.cli.doctor import computer, peers, run
from swarmcli.cli.doctor.finding import Check, Context, Finding, findings
from swarmcli.cli.doctor.verb import CHECKS
from swarmcli.cli.service import Systemd
from swarmcli.clock import Clock
from swarmcli.journal import JOURNAL_NAME, Journal
from swarmcli.machine.registry import LocalPeer, LocalPeers
from swarmcli.machine.sensors import VARIABLE as SENSORS
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import Identity
from swarmcli.network.loop_thread import LoopThread
from swarmcli.network.transports.tcp.transport import TCPTransport
from swarmcli.peer.home import Home
from swarmcli.peer.peer import RunPeer
from swarmcli.recipe import Link, parse_link
from swarmcli.recipe.run_key import RunKey
from swarmcli.recipe.ticket import Ticket
from swarmcli.training import memory, outline
from tests.checkpoints.shelves import put
from tests.cli.doctor.faults import OTHER, home_with, listener, nobody, speaks_http, speaks_version_9
from tests.journal import samples
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
        list(peers.find_homes(self.context))
        assert self.context.homes == [home]
        return home


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("SWARM_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("SWARM_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("SWARM_CONFIG", str(tmp_path / "config.yaml"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)
    # A process of its own would find out the same, in seconds.
    monkeypatch.setattr(outline, "outline_of", lambda recipe: torch.nn.Linear(76, 100, device="meta"))
    with ExitStack() as until:
        yield World(tmp_path, monkeypatch, until, Context())


Findings = Iterable[Finding]


def found_by(look: Callable[[Context], Iterable[Finding]], world: World) -> list[Finding]:
    """As `swarm doctor` runs this check."""
    return list(findings(next(check for check in CHECKS if check.look == look), world.context))


def a_missing_package(world: World) -> Findings:
    world.set.setattr(metadata, "requires", lambda name: ["no-such-package>=1", "numpy>=2"])
    return found_by(computer.check_python, world)


def an_old_package(world: World) -> Findings:
    world.set.setattr(metadata, "requires", lambda name: ["numpy>=99"])
    return found_by(computer.check_python, world)


def a_product_that_is_wrong(world: World) -> Findings:
    world.set.setattr(torch, "mm", lambda one, other: (one @ other).roll(1, 0))
    return found_by(computer.check_torch, world)


def a_device_that_fails(world: World) -> Findings:
    def fails(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image is available for execution on the device")

    world.set.setattr(torch, "mm", fails)
    return found_by(computer.check_torch, world)


def a_device_that_is_not_there(world: World) -> Findings:
    world.recipe("local.device=cuda:77")
    return found_by(computer.check_torch, world)


def a_full_disk(world: World) -> Findings:
    world.set.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10**12, 10**12, 10**7))
    return found_by(computer.check_disk, world)


def a_full_disk_of_a_running_peer(world: World) -> Findings:
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
    return found_by(computer.check_disk, world)


def a_directory_of_others(world: World) -> Findings:
    world.data.mkdir()
    world.set.setattr(os, "access", lambda place, mode: Path(place) != world.data)
    return found_by(computer.check_disk, world)


def a_clock_without_battery(world: World) -> Findings:
    world.set.setattr(time, "time", lambda: 1000.0)
    return found_by(computer.check_clock, world)


def a_clock_that_is_off(world: World) -> Findings:
    return [run.clock_finding(7200.0)]


def an_unknown_limit(world: World) -> Findings:
    world.config("limits:\n  uplaod: 2 MB/s\n")
    return found_by(computer.check_configuration, world)


def a_battery(world: World) -> Findings:
    world.config("limits:\n  on_battery: false\n")
    (world.here / "sensors.json").write_text(json.dumps({"on_battery": True}))
    world.set.setenv(SENSORS, str(world.here / "sensors.json"))
    return found_by(computer.check_limits, world)


def other_hours(world: World) -> Findings:
    world.config("limits:\n  hours: 22:00-08:00\n  time_zone: UTC\n")
    (world.here / "sensors.json").write_text(json.dumps({"now": 1_790_000_000 // 86400 * 86400 + 12 * 3600}))
    world.set.setenv(SENSORS, str(world.here / "sensors.json"))
    return found_by(computer.check_limits, world)


def an_unknown_key(world: World) -> Findings:
    (world.here / "small.yaml").write_text(SMALL.replace("sequence_len", "sequence_length"))
    world.context.target = "small.yaml"
    return found_by(run.check_recipe, world)


def a_recipe_that_is_not_there(world: World) -> Findings:
    world.context.target = "nowhere.yaml"
    return found_by(run.check_recipe, world)


def half_a_link(world: World) -> Findings:
    world.context.target = str(Link(PEER, ("203.0.113.7:1",), "small", "a" * 32))[:100]
    return found_by(run.check_recipe, world)


def an_ended_invitation(world: World) -> Findings:
    key = RunKey(OTHER.private_key)
    ticket = Ticket.for_bearer(OTHER.peer_id, *key.invite_bearer("a" * 32, PEER, 1_000_000))
    world.context.target = str(Link(PEER, ("203.0.113.7:1",), "small", "a" * 32, ticket))
    return found_by(run.check_recipe, world)


def no_invitation(world: World) -> Findings:
    world.recipe("access=invite", f"run_key={OTHER.peer_id}", "network.initial_peers=[tcp://127.0.0.1:1]")
    return found_by(run.check_contacts, world)


def missing_data(world: World) -> Findings:
    world.recipe("datasets=[{source: files, path: nowhere}]")
    return found_by(run.check_data, world)


def too_little_memory(world: World) -> Findings:
    world.recipe()
    model = torch.nn.Linear(1 << 20, 1 << 20, device="meta")
    world.set.setattr(outline, "outline_of", lambda recipe: model)
    world.set.setattr(memory, "rooms", lambda compute: [memory.Room(memory.HOST, 8 << 30, 4 << 30)])
    return found_by(run.check_memory, world)


def a_journal_of_the_run(world: World, *, bytes_sent: int = 0) -> None:
    """Two trainers have computed epochs of 32 samples in a second each; rounds took a quarter of that."""
    home = world.here / "runs" / "small" / "trainer-1"
    home.mkdir(parents=True)
    journal = Journal(home / JOURNAL_NAME, run=replace(samples.RUN, run_id="small"), clock=samples.Clock())
    for number in (1, 2):
        took = {"looking for group": 9.0, "running all-reduce": 0.25}
        journal.record(replace(samples.averaging_round(number), bytes_sent=bytes_sent, seconds=took))
        journal.record(replace(samples.epoch(number, samples=32), seconds=1.25, averaging_seconds=0.25))
    journal.close("done")


def sending(world: World) -> Findings:
    return found_by(run.check_memory, world) + found_by(peers.find_homes, world) + found_by(run.check_sending, world)


def a_line_that_is_too_slow(world: World) -> Findings:
    world.config("limits: {upload: 40 kbit/s}")
    world.recipe()
    a_journal_of_the_run(world)
    return sending(world)


def a_line_that_is_too_slow_for_sparse_gradients(world: World) -> Findings:
    world.recipe("gradient_averaging={method: topk, k: 256, bits: 8}", "averaging.trust=members")
    a_journal_of_the_run(world, bytes_sent=500)
    return sending(world)


def a_line_that_no_way_to_train_makes_good(world: World) -> Findings:
    outer = "outer={optimizer: sgd, lr: 1, momentum: 0, inner_batch_size: 16}"
    world.recipe(outer, "compression.gradients=blockwise_4bit", "target_batch_size=1600")  # 50 steps of two peers
    a_journal_of_the_run(world, bytes_sent=12)
    return sending(world)


def a_key_that_others_read(world: World) -> Findings:
    (world.home() / "identity.key").chmod(0o644)
    return found_by(peers.check_identities, world)


def a_torn_key(world: World) -> Findings:
    (world.home() / "identity.key").write_text("-----BEGIN PRIV")
    return found_by(peers.check_identities, world)


def a_torn_membership(world: World) -> Findings:
    (world.home() / "membership.json").write_text("{")
    return found_by(peers.check_identities, world)


def a_damaged_journal(world: World) -> Findings:
    file = world.home() / JOURNAL_NAME
    data = bytearray(file.read_bytes())
    data[4096:20_000] = b"\xff" * (20_000 - 4096)
    file.write_bytes(data)
    return found_by(peers.check_journals, world)


def a_journal_of_another_program(world: World) -> Findings:
    (world.home() / JOURNAL_NAME).write_bytes(b"not a journal" * 1000)
    return found_by(peers.check_journals, world)


def a_kill(world: World) -> Findings:
    world.home(ended=False)
    return found_by(peers.check_journals, world)


def a_torn_checkpoint(world: World) -> Findings:
    place = put(Shelf(world.home() / "checkpoints"), 1)
    (place / MODEL).write_bytes(b"weight")
    return found_by(peers.check_checkpoints, world)


def a_flipped_bit(world: World) -> Findings:
    place = put(Shelf(world.home() / "checkpoints"), 1)
    (place / MODEL).write_bytes(b"weighty"[::-1])
    return found_by(peers.check_checkpoints, world)


def a_killed_peer(world: World) -> Findings:
    registry = world.context.registry
    world.until.enter_context(registry.entered(LocalPeer(2**31 - 1, 1000.0, "trainer", "small", "/homes/one")))
    return found_by(peers.check_leftovers, world)


def a_silent_peer(world: World) -> Findings:
    entry = world.until.enter_context(LocalPeers().entered(LocalPeer.here("trainer", "small", world.here)))
    entry.announce(name="Ada", api=world.until.enter_context(nobody()).replace("tcp:", "http:"), token="secret")
    return found_by(peers.check_peers, world)


def a_service_that_ended(world: World) -> Findings:
    world.set.setattr(service, "manager", Systemd)
    world.set.setattr(Systemd, "look", lambda self, name: (False, "failed"))
    file = Systemd().file("small")
    file.parent.mkdir(parents=True)
    file.write_text("")
    return found_by(peers.check_services, world)


def contact(world: World, address: str) -> Findings:
    world.context.link = Link(PEER, (address.removeprefix("tcp://"),), "small", "a" * 32)
    return found_by(run.check_contacts, world)


def a_name_that_leads_nowhere(world: World) -> Findings:
    def fails(host: str, *rest: object, **more: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    world.set.setattr(socket, "getaddrinfo", fails)
    return contact(world, "tcp://peer.example.org:31330")


def nobody_there(world: World) -> Findings:
    return contact(world, world.until.enter_context(nobody()))


def no_network(world: World) -> Findings:
    async def unreachable(*_: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    world.set.setattr(asyncio.SelectorEventLoop, "sock_connect", unreachable)
    return contact(world, "tcp://192.0.2.1:9")


def another_program(world: World) -> Findings:
    return contact(world, world.until.enter_context(listener(speaks_http)))


def another_version(world: World) -> Findings:
    world.context.peers = [world.until.enter_context(listener(speaks_version_9))]
    world.recipe()
    return found_by(run.check_contacts, world)


def another_peer(world: World) -> Findings:
    return contact(world, world.until.enter_context(listener(speaks_version_9)))


def a_clock_two_hours_behind(world: World) -> Findings:
    """Of a link that this computer has not joined: nothing else is asked of its contact."""
    thread = LoopThread.acquire()
    world.until.callback(thread.release)
    endpoint = Endpoint(TCPTransport(OTHER, host="127.0.0.1"), clock=Clock(lambda: time.time() + 7200.0))
    thread.run(endpoint.start())
    world.until.callback(lambda: thread.run(endpoint.close()))
    place = endpoint.addresses[0].removeprefix("tcp://").partition("/")[0]
    world.context.link = Link(OTHER.peer_id, (place,), "small", "a" * 32)
    return found_by(run.check_contacts, world)


def a_port_that_is_filtered(world: World) -> Findings:
    """What is sent there is dropped, as by a firewall: a full queue of connections does the same."""
    world.set.setattr(run, "CONTACT_SECONDS", 0.5)
    server = world.until.enter_context(closing(socket.socket()))
    server.bind(("127.0.0.1", 0))
    server.listen(0)
    for _ in range(4):
        waiting = world.until.enter_context(closing(socket.socket()))
        waiting.setblocking(False)
        waiting.connect_ex(server.getsockname())
    return contact(world, f"tcp://127.0.0.1:{server.getsockname()[1]}")


class Fault(NamedTuple):
    break_it: Callable[[World], Findings]
    named: str  # words of the line that names it …
    fix: str  # … and of what helps
    outcome: str = "FAIL"


FAULTS = [
    Fault(a_missing_package, "no-such-package is missing", '-m pip install "no-such-package>=1"'),
    Fault(an_old_package, "and swarm needs >=99", '-m pip install "numpy>=99"'),
    Fault(a_product_that_is_wrong, "float32: a product of matrices comes out wrong", "do not train on it"),
    Fault(a_device_that_fails, "no kernel image", "update the driver"),
    Fault(a_device_that_is_not_there, "device: ", "set it to auto, or to cpu"),
    Fault(a_full_disk, "disk: 0.0 GB free", "make room there"),
    Fault(a_full_disk_of_a_running_peer, "external/trainer-1 (directory of a running peer)", "another --home"),
    Fault(a_directory_of_others, "you may not write", "set SWARM_DATA_DIR"),
    Fault(a_clock_without_battery, "it is the year 1970", "set the clock"),
    Fault(a_clock_that_is_off, "7,200 s behind the contacts'", "set the clock"),
    Fault(a_clock_two_hours_behind, "clock: this computer's clock is 7,200 s behind the contacts'", "set the clock"),
    Fault(a_port_that_is_filtered, "TCP: ", "if no contact answers, a firewall"),
    Fault(an_unknown_limit, "config.yaml:2", "did you mean upload"),
    Fault(a_battery, "would pause now: on battery", "swarm limits set", "WARN"),
    Fault(other_hours, "on again at 22:00", "swarm limits set", "WARN"),
    Fault(an_unknown_key, "sequence_length", "sequence_len"),
    Fault(a_recipe_that_is_not_there, "nowhere.yaml", "give a link"),
    Fault(half_a_link, "link: ", "copy"),
    Fault(an_ended_invitation, "the invitation of this link held until", "swarm invite"),
    Fault(no_invitation, "is closed", "`swarm invite`"),
    Fault(missing_data, "nowhere does not exist", "put the text files there"),
    Fault(too_little_memory, "it needs about", "take a smaller model"),
    Fault(
        a_line_that_is_too_slow,
        "sending: a round sends 30.8 kB, 6.2 s at 0.04 Mbit/s up, beside 1.0 s in which 2 peers compute an epoch",
        "`target_batch_size: 480`, `outer: {optimizer: sgd, inner_batch_size: 16}`, "
        "`compression: {gradients: blockwise_4bit}`: outer steps every 15 in 4 bits: 4.39 kB, 0.9 s of sending",
        "WARN",
    ),
    Fault(a_line_that_is_too_slow_for_sparse_gradients, "compute an epoch", "and remove gradient_averaging: ", "WARN"),
    Fault(a_line_that_no_way_to_train_makes_good, "compute an epoch", "a larger target_batch_size makes", "WARN"),
    Fault(a_key_that_others_read, "mode 0644", "chmod 600"),
    Fault(a_torn_key, "holds no Ed25519 private key", "restore a backup"),
    Fault(a_torn_membership, "membership.json cannot be read", "backup"),
    Fault(a_damaged_journal, "journal: ", "mv "),
    Fault(a_journal_of_another_program, "is damaged", "mv "),
    Fault(a_kill, "ended without a goodbye", "start it again", "WARN"),
    Fault(a_torn_checkpoint, "has 6 of 7 bytes", "rm -r"),
    Fault(a_flipped_bit, "not what was written", "rm -r"),
    Fault(a_killed_peer, "process 2147483647 was killed", "swarm log", "WARN"),
    Fault(a_silent_peer, "Ada (trainer of small) does not answer", "swarm stop --now"),
    Fault(a_service_that_ended, "small does not run (failed)", "journalctl --user -u swarm-small"),
    Fault(a_name_that_leads_nowhere, "name: peer.example.org cannot be resolved: Name or service", "name server"),
    Fault(nobody_there, "TCP: nothing listens there", "ask for another link"),
    Fault(no_network, "TCP: Network is unreachable", "this computer has no network"),
    Fault(another_program, "TCP is well; TLS: ", "another program answers there"),
    Fault(another_peer, "TCP and TLS are well; identity: ", "ask for a new link"),
    Fault(another_version, "TCP and TLS and identity are well; version: ", "update the older one"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.break_it.__name__ for fault in FAULTS])
def test_what_was_broken_is_named_with_what_helps(fault: Fault, world: World) -> None:
    found = list(fault.break_it(world))
    named = [f"{each.check}: {each.text}" for each in found if each.outcome == fault.outcome]
    fixes = [each.fix for each in found if each.outcome == fault.outcome]
    assert any(fault.named in text for text in named), found
    assert any(fault.fix in text for text in fixes), found
    assert all(each.fix for each in found if each.outcome in ("WARN", "FAIL"))


def test_a_peer_of_the_run_is_well_and_one_with_another_recipe_is_not(world: World) -> None:
    recipe = small("local.host=127.0.0.1", f"output_dir={world.here}", "seed=4", directory=world.here)
    with RunPeer(recipe, "monitor", Home.at(world.here / "monitor")) as peer:
        link = peer.link()
        assert link is not None
        world.context.link = parse_link(str(link))
        found = found_by(run.check_contacts, world) + found_by(run.check_offer, world)
        assert [each.outcome for each in found] == ["OK"] * len(found) and world.context.reached
        assert {each.check for each in found} >= {"contact", "recipe"}
        assert found[0].text.startswith(f"{link.places[0]} ({peer.peer_id.short}) answers in ")
        assert world.context.recipe is not None and world.context.recipe.seed == 4
        world.context = Context(peers=link.addresses)
        world.recipe("seed=5")
        (other,) = (each for each in found_by(run.check_contacts, world) if each.check == "contact")
        assert other.outcome == "FAIL" and "recipe: " in other.text and "seed" in other.text and other.fix


def test_how_long_a_round_sends_is_told_as_far_as_line_and_pace_are_known(world: World) -> None:
    def said() -> str:
        (found,) = (each for each in sending(world) if each.check == "sending")
        assert found.outcome == "OK"
        return found.text

    world.recipe()
    assert re.fullmatch(r"an epoch sends [0-9.]+ kB, which takes 0.1 s at 10 Mbit/s, .*--network measures .*", said())
    world.context.uplink = 1e5
    assert re.fullmatch(r"a round sends [0-9.]+ kB, 0.3 s at 0.8 Mbit/s up; no journal here tells .*", said())
    world.config("limits: {upload: 400 kbit/s}")
    assert "at 0.4 Mbit/s up" in said()  # the limit counts, where it is the lower one
    world.config("")
    world.context.uplink = None
    a_journal_of_the_run(world, bytes_sent=50_000)
    assert re.search("at 1.6 Mbit/s up, beside 1.0 s in which 2 peers compute an epoch$", said())


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
