"""Sites of real processes in a run with others: what they add up to, and what stays true when a part of one dies."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from swarmcli.cli.processes import Child
from swarmcli.training import load_checkpoint
from tests.end_to_end.site_processes import alive, listening, ranks
from tests.end_to_end.swarm import Swarm
from tests.end_to_end.test_recipes import EPOCHS, OVERRIDES, RECIPES
from tests.end_to_end.test_run import finish

pytestmark = pytest.mark.e2e

MakeSwarm = Callable[..., Swarm]
TARGET = 2048  # samples in an epoch: some tenths of a second


def contributes_after(run: Swarm, name: str, epoch: int, *alive: Child) -> None:
    run.wait(
        lambda: any(each.own_samples and each.epoch > epoch for each in run.epochs(name)),
        f"{name} contributes behind epoch {epoch}",
        *alive,
    )


def test_a_site_is_one_peer_with_the_samples_of_all_its_processes(swarm: MakeSwarm) -> None:
    epochs = 3 * EPOCHS  # long enough for the trainer to come, on a machine that is busy with other tests
    run = swarm(epochs)
    run.recipe = RECIPES / "site.yaml"
    words = [*OVERRIDES, "--set", "run_id=test-run", "--set", f"output_dir={run.directory}"]
    words += ["--set", f"max_epochs={epochs}"]
    site = run.start("join", "site", *words)
    run.wait(lambda: (run.home("site") / "peer.json").exists(), "the site is up", site)
    assert sorted(ranks(site)) == [0, 1]
    run.contact = run.told("site")["addresses"][0]
    trainer = run.start("join", "trainer", *words, "--nproc", "1")
    finish(run, epochs, site, trainer)
    together = [epoch for epoch in run.epochs("trainer") if epoch.peers == 2]
    assert together
    by_epoch = {epoch.epoch: epoch for epoch in run.epochs("site")}
    assert all(by_epoch[each.epoch].own_samples + each.own_samples == each.samples for each in together[1:])
    assert load_checkpoint(run.home("site") / "checkpoints" / f"epoch-{epochs:06d}").optimizer["state"]
    said = site.log.read_text()
    assert "a site of 2 processes" in said and said.count(f"left at epoch {epochs}") == 1
    assert "Traceback" not in said and "elastic" not in said


def test_a_site_listens_for_its_swarm_and_else_on_loopback_alone_and_nothing_outlives_its_launcher(
    swarm: MakeSwarm,
) -> None:
    run = swarm(1000)
    site = run.start("join", "site", "--nproc", "2", "--host", "0.0.0.0")
    seen: set[tuple[str, int]] = set()

    def is_up() -> bool:
        for pid in (site.pid, *ranks(site).values()):
            seen.update(listening(pid))
        return run.epoch("site") >= 1

    run.wait(is_up, "the site trains", site)
    port = urlsplit(run.told("site")["addresses"][0]).port
    assert ("0.0.0.0", port) in seen
    assert {address for address, at in seen if at != port} == {"127.0.0.1"}
    assert listening(site.pid) == set()
    processes = list(ranks(site).values())
    site.kill()
    run.wait(lambda: alive(processes) == [], "they end")


def test_a_site_whose_processes_are_killed_or_frozen_is_the_same_peer_again(swarm: MakeSwarm) -> None:
    run = swarm(1000, target=TARGET)
    monitor = run.start_monitor()
    site = run.start("join", "site", "--nproc", "2", "--set", "local.site.timeout=8")
    trainer = run.start("join", "trainer")
    contributes_after(run, "site", 1, site, trainer)
    peer = run.told("site")["peer"]
    for rank, number, words in [
        (0, signal.SIGKILL, "process 0 of this site was ended by SIGKILL"),
        (1, signal.SIGSTOP, "Timed out waiting 8000ms for"),  # to send or to receive: whatever rank 0 was at
    ]:
        hit, at = ranks(site)[rank], run.epoch("trainer")
        os.kill(hit, number)
        run.wait_for_epoch("trainer", at + 2, trainer)  # nobody waits for it
        run.wait(lambda hit=hit: alive([hit]) == [] and len(ranks(site)) == 2, "the site starts again", site)
        contributes_after(run, "site", max(run.epoch("trainer"), run.epoch("site")), site, trainer)
        assert run.told("site")["peer"] == peer
        assert words in site.log.read_text()
    processes = list(ranks(site).values())
    for each in (site, trainer, monitor):
        os.kill(each.pid, signal.SIGINT)
    for each in (site, trainer, monitor):
        run.wait_for_end(each, 130)
    assert alive(processes) == []
    assert "Traceback" not in site.log.read_text()


def test_two_machines_with_torchrun_are_a_site_until_one_is_interrupted(swarm: MakeSwarm) -> None:
    run = swarm(1000)
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "site"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    machines = [
        run.start("join", name, "--home", str(run.home("site")), launcher=torchrun)
        for name in ("machine-1", "machine-2")
    ]
    run.wait_for_epoch("site", 2, *machines)
    assert sorted(rank for machine in machines for rank in ranks(machine)) == [0, 1]
    processes = [pid for machine in machines for pid in ranks(machine).values()]
    os.kill(machines[1].pid, signal.SIGINT)
    run.wait(lambda: alive(processes) == [], "both processes leave")
    assert run.summary("site")["epoch"] >= 2
    for machine in machines:
        machine.kill()  # one torchrun waits for the other, which was interrupted
    said = "".join(machine.log.read_text() for machine in machines)
    assert "a site of 2 processes" in said and said.count("left at epoch") == 1


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
