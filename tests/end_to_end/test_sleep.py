"""A laptop that sleeps and wakes up, with real processes."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import pytest

from tests.end_to_end.swarm import Swarm

SLEEP_SECONDS = 16.0  # beyond Limits.asleep_after


@pytest.mark.e2e
def test_a_trainer_that_slept_is_soon_back_in_the_run(swarm: Callable[..., Swarm]) -> None:
    """It stands still for longer than others wait for it, while the kernel's clock goes on, as in a real sleep."""
    run = swarm(100_000)
    run.start_monitor()
    run.start("join", "trainer")
    laptop = run.start("join", "laptop")
    run.wait(lambda: run.epoch("laptop") >= 2, "both train")

    process = psutil.Process(laptop.pid)
    process.suspend()
    asleep_at = time.monotonic()
    run.wait(lambda: time.monotonic() > asleep_at + SLEEP_SECONDS, "the others go on")
    process.resume()
    woke_at, others = time.monotonic(), run.epoch("trainer")
    run.wait_for_epoch("laptop", others + 1, laptop)
    print(f"{time.monotonic() - woke_at:.1f} s after waking up it ended an epoch with the others")
    assert any(line.kind == "woke up" for line in run.events("laptop"))
