"""For all tests: which suite each is in; one thread of torch per process; the browser and
homes behind routers, missed loudly if missing."""

from __future__ import annotations

import contextlib
import gc
import getpass
import importlib
import os
import shutil
import tempfile
import threading
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
# Whoever runs the tests may lend this computer to a run, with limits: they are of no concern here.
os.environ["SWARM_CONFIG"] = str(Path(os.environ["SWARM_RUNTIME_DIR"]) / "no-config.yaml")
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


FIRST_SEEDS = 1  # of a matrix of seeds, which `make test` and `make e2e` run; `make soak` runs the others


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Before all workers import all test modules, each imports a share of its own.

    pytest rewrites the asserts of a module that it imports for the first time, and keeps the result as bytecode: of
    all these that takes ten seconds, which each worker would spend on the same.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None or not isinstance(collector, pytest.Session):
        return
    directories = [Path(argument).resolve() for argument in collector.config.args]
    paths = sorted({path for directory in directories for path in directory.rglob("test_*.py")})
    for path in paths[int(worker.removeprefix("gw")) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # told when the module is collected
            importlib.import_module(".".join(path.relative_to(collector.config.rootpath).with_suffix("").parts))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays to the end: the garbage collector does not walk through it, neither now
    nor after each test that calls it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# Parts of the paths of tests that take a quarter of a minute and more.
LONG = {"end_to_end", "examples", "test_killed_saves.py", "test_leaks.py"}


@pytest.hookimpl(wrapper=True, tryfirst=True)  # marks come before what -m names is chosen, the order after it
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    mark(items)
    yield
    items[:] = deal(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))


def mark(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("browser") or item.get_closest_marker("homes"):
            item.add_marker("e2e")
        matrix = getattr(item, "callspec", None)
        seed = matrix.params.get("seed") if matrix else None
        if isinstance(seed, int) and min(seed, matrix.indices["seed"]) >= FIRST_SEEDS:
            item.add_marker("soak")


def deal(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Every worker begins with its share of the long tests, so that none is left with one when the others are done.

    pytest-xdist gives each worker a piece of the list, the first one the first piece; of the ends of these pieces
    workers that are done take something over. Short tests stay together by module, since they share fixtures.
    """
    long = [item for item in items if LONG.intersection(item.path.parts)]
    short = [item for item in items if not LONG.intersection(item.path.parts)]
    dealt: list[pytest.Item] = []
    for worker in range(workers):
        share = long[worker::workers]
        end = len(items) * (worker + 1) // workers
        filler = max(0, end - len(dealt) - len(share))
        dealt += share + short[:filler]
        del short[:filler]
    return dealt + short


def find_chromium() -> str | None:
    return os.environ.get("SWARM_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Fails the test that leaves a thread of a peer behind, and not one that comes later and counts them.

    What a module's fixtures hold was there before the test. Workers of a loop come when it has work and end with it:
    the loop's own thread stands for them. Nothing can end the search for a name's address.
    """
    before = set(threading.enumerate())
    yield
    new = [thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("swarm")]
    left = [thread for thread in new if not thread.name.startswith(("swarm-work", "swarm-names"))]
    for thread in left:
        thread.join(5.0)  # one that was told to end may need a moment on a busy machine
    assert not (alive := [thread.name for thread in left if thread.is_alive()]), f"the test leaves {alive} behind"


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
