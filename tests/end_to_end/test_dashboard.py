"""The dashboard of a real run in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.end_to_end.swarm import PATIENCE_SECONDS, Swarm

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

MakeSwarm = Callable[..., Swarm]
PATIENCE = PATIENCE_SECONDS * 1000  # milliseconds, as playwright counts


def epoch_shown(page: Page) -> int:
    return int(page.inner_text("#epoch"))


def test_an_open_page_sees_two_trainers_and_the_epoch_rise(swarm: MakeSwarm, chromium: Browser) -> None:
    run = swarm(1000)
    monitor = run.start_monitor()
    context = chromium.new_context()
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(run.told("monitor")["dashboard"])
    page.wait_for_selector('body[data-connection="live"]', timeout=PATIENCE)
    assert "swarm join" in page.inner_text("body")

    trainers = [run.start("join", name) for name in ("Ada <img src=x>", "Grace")]
    run.wait(lambda: epoch_shown(page) >= 2, "the page shows two epochs", monitor, *trainers)
    seen = epoch_shown(page)
    run.wait(lambda: epoch_shown(page) > seen, "the epoch rises on the page", monitor, *trainers)
    for name in ("Ada <img src=x>", "Grace"):
        page.get_by_text(name, exact=True).first.wait_for(timeout=PATIENCE)
    context.close()
    assert errors == []
    assert all(child.returncode is None for child in (monitor, *trainers))
