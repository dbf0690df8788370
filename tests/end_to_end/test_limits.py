"""A laptop among real processes: it is not lent all day, and it sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from swarmcli.journal import Line
from swarmcli.machine import client
from swarmcli.machine.registry import VARIABLE, LocalPeers
from tests.end_to_end.swarm import Swarm

SLEEP_SECONDS = 16.0  # beyond Limits.asleep_after


@pytest.mark.e2e
def test_a_laptop_outside_its_hours_hands_in_its_work_pauses_and_goes_on_and_is_soon_back_after_a_sleep(
    swarm: Callable[..., Swarm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "registry"))
    run = swarm(100_000)
    run.start_monitor()
    trainer = run.start("join", "trainer")
    laptop = run.start("join", "laptop", "--limit", "processor=60%")
    run.wait(lambda: worked(run) >= 2, "both train", trainer, laptop)

    lend(f"{(datetime.now().hour + 6) % 24}:00-{(datetime.now().hour + 7) % 24}:00")
    paused = "paused: outside the hours that you lend, on again at "
    run.wait(lambda: bool(told(run, paused)), "the laptop pauses, and says why", trainer, laptop)
    assert told(run, paused)[0].text.endswith(":00"), "what it had computed was left behind"
    before, epoch = worked(run), run.epoch("trainer")
    run.wait_for_epoch("trainer", epoch + 3, trainer, laptop)
    assert worked(run) == before

    lend("none")
    run.wait(lambda: worked(run) >= before + 2, "the laptop goes on", trainer, laptop)
    assert not [line for line in run.events("laptop") if "not in the average" in line.text]

    # The laptop's process stands still for longer than others wait for it, while the kernel's clock goes on, as in a
    # real sleep.
    process, asleep_at = psutil.Process(laptop.pid), time.monotonic()
    process.suspend()
    run.wait(lambda: time.monotonic() > asleep_at + SLEEP_SECONDS, "the others go on", trainer)
    process.resume()
    run.wait_for_epoch("laptop", run.epoch("trainer") + 1, laptop)
    assert any(line.kind == "woke up" for line in run.events("laptop"))


def lend(hours: str) -> None:
    (laptop,) = (peer for peer in LocalPeers().peers() if peer.name == "laptop")
    client.patch(laptop, "limits", {"changes": {"hours": hours}, "keep": False})


def told(run: Swarm, text: str) -> list[Line]:
    return [line for line in run.events("laptop") if line.text.startswith(text)]


def worked(run: Swarm) -> int:
    """Epochs with samples of the laptop in them."""
    return sum(each.own_samples > 0 for each in run.epochs("laptop"))
