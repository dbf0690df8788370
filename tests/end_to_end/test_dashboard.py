"""The dashboard of a real run in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from swarmcli.recipe.limit_store import limits_file
from tests.end_to_end.swarm import PATIENCE_SECONDS, Swarm

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

MakeSwarm = Callable[..., Swarm]
PATIENCE = PATIENCE_SECONDS * 1000  # milliseconds, as playwright counts


def test_a_volunteer_opens_the_printed_link_pauses_sets_a_limit_and_goes_on(
    swarm: MakeSwarm, chromium: Browser
) -> None:
    run = swarm(1000)
    monitor = run.start_monitor()
    config = run.directory / "config.yaml"
    own = {"SWARM_CONFIG": str(config), "SWARM_RUNTIME_DIR": str(run.directory / "runtime")}
    trainer = run.start("join", "Ada", "--web", "0", environment=own)
    link = re.compile(r"dashboard: (http\S+token=\S+)")
    run.wait(lambda: link.search(trainer.log.read_text()) is not None, "the link is printed", monitor, trainer)
    printed = link.search(trainer.log.read_text())
    assert printed is not None
    context = chromium.new_context()
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.goto(printed[1])
    page.wait_for_selector("#pause:enabled")
    run.wait_for_epoch("monitor", 2, monitor, trainer)

    page.get_by_role("button", name="Pause").click()
    page.wait_for_selector('body[data-activity="paused"]')
    paused_at = run.epoch("monitor")
    page.get_by_text(re.compile("^Paused: you asked")).wait_for()  # it comes with the next state
    page.get_by_label("Upload", exact=True).fill("100 MB/s")
    page.keyboard.press("Enter")
    kept = limits_file(config)
    run.wait(kept.exists, "the limit is kept", monitor, trainer)
    assert json.loads(kept.read_text()) == {"upload": "100 MB/s"}

    page.get_by_role("button", name="Resume").click()
    page.wait_for_selector('body[data-activity="running"]')
    run.wait_for_epoch("monitor", paused_at + 3, monitor, trainer)
    page.get_by_role("button", name="Leave the run").click()
    page.get_by_role("button", name="Hand in, then leave").click()
    run.wait_for_end(trainer)
    page.wait_for_selector('body[data-connection="lost"]')
    context.close()
