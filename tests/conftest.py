"""For all tests: which suite each is in; one thread of torch per process; the browser and
homes behind routers, missed loudly if missing."""

from __future__ import annotations

import gc
import getpass
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings

from benchmarks._homes import Internet, missing

if TYPE_CHECKING:
    from playwright.sync_api import Browser

torch.set_num_threads(1)
# Each collection of the oldest generation walks through everything that torch and pytest hold.
gc.set_threshold(20_000, 20, 20)
# Peers of tests share the cores with each other; a user's own peers do not see them.
os.environ["SWARM_RUNTIME_DIR"] = str(Path(tempfile.gettempdir()) / f"swarm-tests-{getpass.getuser()}")
settings.register_profile("swarm", deadline=None, print_blob=True)  # how long an example takes says nothing here
settings.load_profile("swarm")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Without these Chromium asks its maker's hosts for updates and components at every start.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NO_CHROMIUM = "no Chromium on this machine (see tests/provide_chromium.sh)"
NO_HOMES = "no homes behind routers can be made here"


FIRST_SEEDS = 2  # of a matrix of seeds, which `make test` and `make e2e` run; `make soak` runs the others


@pytest.hookimpl(tryfirst=True)  # before what -m names is chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("browser") or item.get_closest_marker("homes"):
            item.add_marker("e2e")
        matrix = getattr(item, "callspec", None)
        seed = matrix.params.get("seed") if matrix else None
        if isinstance(seed, int) and min(seed, matrix.indices["seed"]) >= FIRST_SEEDS:
            item.add_marker("soak")


def find_chromium() -> str | None:
    return os.environ.get("SWARM_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One headless Chromium for the tests of a module, each of which opens a context of its own in it.

    Not for longer: while it is open, playwright has an event loop running in this thread, and no test can run one.
    """
    path = find_chromium()
    if path is None:
        pytest.skip(NO_CHROMIUM)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture
def internet() -> Iterator[Internet]:
    """An internet without anyone, for tests marked `homes`; at the end no process is left in it."""
    if why := missing():
        pytest.skip(f"{NO_HOMES}: {why}")
    with Internet() as made:
        yield made


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A skipped test is one letter among a thousand; these are named."""
    skipped = terminalreporter.stats.get("skipped", ())
    for reason in (NO_CHROMIUM, NO_HOMES):
        missed = [report for report in skipped if reason in str(report.longrepr)]
        if missed:
            terminalreporter.section(f"NOT RUN: {missed[0].longrepr[2].removeprefix('Skipped: ')}", red=True, bold=True)
            for report in missed:
                terminalreporter.line(report.nodeid, red=True)
