"""What a user sees when something is wrong: the message, the exit code, and what is left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.swarm import Swarm
from tests.suites import soak

pytestmark = pytest.mark.e2e

MakeSwarm = Callable[..., Swarm]


def test_who_does_not_fit_is_refused_with_the_reason(swarm: MakeSwarm) -> None:
    run = swarm(1000)
    run.start_monitor()
    port = run.contact.split(":")[2].split("/")[0]
    for words, code, why in (
        (
            ["sequence_len=16", "optimizer.learning_rate=1"],
            4,
            "the recipe differs in optimizer.learning_rate (here 1.0), sequence_len (here 16)",
        ),
        (["run_id=elsewhere"], 4, "another run: 'test-run', not 'elsewhere'"),
        ([f"local.port={port}"], 1, f"127.0.0.1:{port}"),
    ):
        stranger = run.start(
            "join", f"stranger-{words[0].partition('=')[0]}", *(w for o in words for w in ("--set", o))
        )
        run.wait_for_end(stranger, code)
        assert why in stranger.last_words()
    run.wait(lambda: any("recipe differs" in event.text for event in run.events("monitor")), "the monitor notes it")


def test_first_contacts_that_fail_are_each_named_with_the_step(swarm: MakeSwarm) -> None:
    run = swarm(1000)
    contacts = ["tcp://127.0.0.1:1", "tcp://no-such-host.invalid:31330"]
    words = [word for contact in contacts for word in ("--peer", contact)]
    lost = run.start("join", "lost", *words)
    run.wait_for_end(lost, 3)
    said = lost.last_words(30)
    for contact, why in zip(contacts, ("connection refused", "name resolution failed"), strict=True):
        *_, line = [line for line in said.splitlines() if line.strip().startswith(contact)]
        assert why in line


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), *soak([(signal.SIGTERM, 0)])])
def test_a_signal_ends_a_trainer_in_order(swarm: MakeSwarm, tmp_path: Path, number: int, code: int) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    run = swarm(100_000, target=512)
    monitor = run.start_monitor()
    other = run.start("join", "other")
    os.environ["TMPDIR"], before = str(temporary), os.environ.get("TMPDIR")
    try:
        trainer = run.start("join", "trainer")
    finally:
        os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)
    run.wait(lambda: run.rounds("trainer") != [] and len(run.rounds("trainer")[-1].members) == 3, "all average", other)
    run.wait_for_epoch("trainer", 2, trainer, monitor)
    children = psutil.Process(trainer.pid).children(recursive=True)
    os.kill(trainer.pid, number)
    run.wait_for_end(trainer, code)
    words = trainer.last_words(60)
    assert "leaving" in words and "are lost" not in words, words  # the other one goes on, so a round takes them
    assert children == []
    # torch's own cache may be left.
    left = [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
    assert left == []
    assert not (run.home("trainer") / "peer.json").exists()
    assert run.summary("trainer")["epochs"] >= 2
    run.wait(lambda: any("the peer has left" in event.text for event in run.events("monitor")), "the goodbye is heard")
