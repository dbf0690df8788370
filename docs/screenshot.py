"""Takes the pictures of the dashboard that the documents show, of a run that is made up for it.

    python docs/screenshot.py

They are the real pages in a real browser over the run that the tests use, so that whoever changes a page takes them
anew, and they differ by nothing else. Needs playwright and a Chromium, or its path in SWARM_CHROMIUM.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests are no package that one installs

from coordinator_web.app import create_app
from tests.conftest import ARGUMENTS, NO_CHROMIUM, find_chromium
from tests.web.dashboards import Dashboard
from tests.web.fake_source import FakeControls, FakeRun, as_shown, volunteer

DOCS = Path(__file__).parent


@dataclass(frozen=True)
class Picture:
    """`height` 0: of the whole page."""

    name: str
    run: Callable[[], FakeRun]
    path: str
    width: int = 1200
    height: int = 0
    scheme: str = "light"


def _run() -> FakeRun:
    return FakeRun(finished_epochs=120)


def _own() -> FakeRun:
    limits = as_shown(upload="2 MB/s", processor="50%", hours="22:00-08:00")
    return volunteer(FakeRun(finished_epochs=120, limits=limits))


PICTURES = (
    Picture("dashboard.png", _run, "run", height=1240),
    Picture("dashboard-you.png", _own, ""),
)


def main() -> int:
    chromium = find_chromium()
    if chromium is None:
        sys.stderr.write(f"{NO_CHROMIUM}\n")
        return 1
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(ARGUMENTS))
        for picture in PICTURES:
            take(picture, browser)
            sys.stderr.write(f"docs/{picture.name}\n")
        browser.close()
    return 0


def take(picture: Picture, browser: Any) -> None:
    run = picture.run()
    server = Dashboard(create_app(run, controls=FakeControls(run), control_token="own"))
    context = browser.new_context(
        viewport={"width": picture.width, "height": picture.height or 900},
        color_scheme=picture.scheme,
        reduced_motion="reduce",
    )
    try:
        page = context.new_page()
        page.goto(f"{server.url}{picture.path}?token=own")
        page.wait_for_selector('body[data-connection="live"]')
        page.wait_for_timeout(2000)  # lists and curves are asked for once the state is there
        page.screenshot(path=DOCS / picture.name, full_page=not picture.height)
    finally:
        context.close()
        server.stop()


if __name__ == "__main__":
    sys.exit(main())
