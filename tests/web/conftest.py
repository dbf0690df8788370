from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from coordinator_web.app import create_app
from swarmcli.run.source import DashboardSource

from .dashboards import Dashboard

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Serve = Callable[..., Dashboard]
Open = Callable[..., "Page"]
PATIENCE = 60_000.0  # milliseconds for anything, on a busy machine


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts dashboards on free ports and stops them after the test."""
    servers: list[Dashboard] = []

    def start(source: DashboardSource, *, port: int = 0, **options: object) -> Dashboard:
        server = Dashboard(create_app(source, **options), port=port)  # type: ignore[arg-type]
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[Open]:
    """Opens a page of a dashboard in a browser window of its own; fails if the page reports an error, if its policy
    forbids it something, or if it asks for what is not there."""
    contexts = []
    errors: list[str] = []

    def open_one(url: str, path: str = "run", **options: Any) -> Page:
        context = chromium.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda told: errors.append(told.text) if "Content Security Policy" in told.text else None)
        page.on("response", lambda came: errors.append(f"404: {came.url}") if came.status == 404 else None)
        page.goto(url + path)
        page.wait_for_selector('body[data-connection="live"]')
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert errors == []


def expect_text(page: Page, selector: str, text: str | re.Pattern[str] | Sequence[str]) -> None:
    """Waits for the text of the one element of that kind, which then is to be seen, or for those of all of them: a page
    that has a connection may still wait for its lists and curves."""
    from playwright.sync_api import expect

    expect(page.locator(selector)).to_have_text(text, timeout=PATIENCE)
    if isinstance(text, str) and text:
        expect(page.locator(selector)).to_be_visible(timeout=PATIENCE)
