"""The dashboard of a large run: 1,000 peers, a journal of 1,000,000 rounds and epochs.

Targets: `GET state` within 50 ms, the first paint within a second, memory that does not grow while pages are open.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import psutil

from coordinator_web.app import create_app
from coordinator_web.background import listen, serving, url_of
from swarmcli.events import Contribution, EpochAdvanced, EpochReported, Events
from swarmcli.journal import Journal, RunRecord
from swarmcli.journal.moments import SCALES
from swarmcli.journal.options import JOURNAL
from swarmcli.network.identity import PeerID
from swarmcli.recipe import load_recipe
from swarmcli.run.source import DashboardSource, Providers
from swarmcli.run.watch import RunWatch

PEERS = 1000
ROUNDS = 1_000_000
TOLD_EPOCHS = 200  # epochs of which every peer has reported
MEMBERS = 8
TURNS = 40
VIEWERS = 8
PAGE_SECONDS = 20.0
RUN = "large"
RECIPE = Path(__file__).parents[1] / "recipes" / "stdlib-lm.yaml"
MIB = 1 << 20

NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count}) "


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        ids = [PeerID(number.to_bytes(32, "big")) for number in range(1, PEERS + 1)]
        path, record = home / "journal.sqlite", RunRecord(RUN, "monitor", ids[0].text)
        Journal(path, run=record, clock=time.time).close()
        print(f"filling the journal took {_timed(lambda: _fill(path, ids)):.0f} s", flush=True)
        print(f"it takes {path.stat().st_size / MIB:.0f} MiB")
        with Journal(path, run=record, clock=time.time, size=2**40) as journal:
            watch = _watch(ids, journal)
            given = [Contribution(peer.text, samples=number) for number, peer in enumerate(ids)]
            source = DashboardSource(journal, watch.look, Providers(contributions=lambda: given))
            _measure_parts(journal, watch, source)
            with _serving(source) as url:
                _measure_requests(url)
                _measure_paint(url)
                asyncio.run(_measure_pages(url))


def _timed(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _fill(path: Path, ids: list[PeerID]) -> None:
    """Fills the journal by SQL, since a million events would take minutes, and the sums that the journal makes as rows
    come."""
    import sqlite3

    now = time.time()
    members = json.dumps([peer.text for peer in ids[:MEMBERS]])
    left = json.dumps({ids[3].text: "no part arrived for 4.0 s"})
    seconds = json.dumps({"looking for group": 1.0, "running all-reduce": 0.4})
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA synchronous=OFF")
    connection.execute(
        NUMBERS.format(count=ROUNDS) + "INSERT INTO epochs (run, epoch, lineage, samples, own_samples, peers, loss, "
        "seconds, averaging_seconds, time) "
        "SELECT 1, i, 'ab', 4096, 0, 900, 2.0 + 3.0 / i, 8.0, 0.3, ? + i * 8.0 FROM n",
        (now - ROUNDS * 8.0,),
    )
    connection.execute(
        NUMBERS.format(count=ROUNDS) + "INSERT INTO rounds (run, round_id, purpose, outcome, reason, epoch, leader, "
        "members, contributors, left_out, bytes_sent, bytes_received, seconds, time) "
        "SELECT 1, hex(i), 'grads', CASE i % 50 WHEN 7 THEN 'failed' ELSE 'committed' END, '', i, ?, ?, ?, "
        "CASE i % 11 WHEN 5 THEN ? ELSE '{}' END, 40000000, 39000000, ?, ? + i * 8.0 FROM n",
        (ids[0].text, members, members, left, seconds, now - ROUNDS * 8.0),
    )
    connection.execute("INSERT INTO curve (run_id, epoch, row, stepped) SELECT ?, epoch, id, 1 FROM epochs", (RUN,))
    connection.execute(
        "UPDATE totals SET epochs = ?, reached = ?, bytes_sent = ? * 40000000, bytes_received = ? * 39000000, "
        "rounds_failed = failed, rounds_committed = ? - failed "
        "FROM (SELECT count(*) AS failed FROM rounds WHERE outcome = 'failed')",
        (ROUNDS,) * 5,
    )
    report = "INSERT INTO reports (run, peer, epoch, loss, samples, samples_per_second, time) "
    for epoch in range(ROUNDS - TOLD_EPOCHS, ROUNDS + 1):
        connection.executemany(
            report + "VALUES (1, ?, ?, 2.0, 1, 10, ?)",
            [(peer.text, epoch, now) for peer in ids],
        )
    kept = JOURNAL.moments
    for scale in SCALES:
        connection.execute(
            NUMBERS.format(count=kept) + "INSERT INTO moments SELECT ?, ?, ? / ? - i, ? - i * ?, ? - i * ?, 1, 1000, "
            "990, 5000.0, ? - i * ? / 8, 2.0, 1 FROM n WHERE i > ?",
            (RUN, scale, int(now), scale, now, scale, now, scale, ROUNDS, scale, 0 if scale == SCALES[0] else kept / 2),
        )
    connection.commit()
    connection.close()


def _watch(ids: list[PeerID], journal: Journal) -> RunWatch:
    """Returns what a monitor that follows 999 trainers sees."""
    recipe = load_recipe(RECIPE)
    reports = {
        peer: SimpleNamespace(
            role="trainer", name=f"peer-{number}", epoch=ROUNDS, phase="training", samples_per_second=10.0, loss=2.0,
            lineage="aa", device="cpu", client_mode=bool(number % 3), drift=None, last_outcome="committed",
            last_reason="", time=time.time(), pause="", team="", evaluation=None,
        )
        for number, peer in enumerate(ids)
    }  # fmt: skip
    reports[ids[0]].role = "monitor"
    others = {peer: report for peer, report in reports.items() if peer != ids[0]}
    optimizer = SimpleNamespace(
        global_progress=SimpleNamespace(epoch=ROUNDS), local_epoch=ROUNDS, is_averaging=False,
        report=lambda: reports[ids[0]], peers=lambda: dict(others), downloading="", round_bytes=0,
        seat_lost=None, seconds_to_send=0.0,
        tracker=SimpleNamespace(expected=lambda: dict.fromkeys(ids, (1.0, 10.0))),
        directory=SimpleNamespace(age=lambda peer: 1.0, report_age=lambda peer: 1.0, is_there=lambda peer: True),
        claims=SimpleNamespace(apart=dict),
    )  # fmt: skip
    events = Events()
    peer = SimpleNamespace(
        events=events, recipe=recipe, peer_id=ids[0], role="monitor", saved="", journal=journal,
        link=lambda: None, no_link="", description=SimpleNamespace(name="monitor"), others_of_run=tuple,
        activity=SimpleNamespace(status=lambda: SimpleNamespace(state="running", reasons=(), since=None)),
        dht=SimpleNamespace(
            is_alive=lambda: True,
            moved={}, endpoint=SimpleNamespace(seen=lambda peer: None),
            clock=SimpleNamespace(now=time.time, uncorrected=0.0),
            reach=SimpleNamespace(sentence=lambda: "others can dial this peer")
        ),
    )  # fmt: skip
    watch = RunWatch(cast(Any, peer))
    watch.state = "training"
    watch.follow(cast(Any, optimizer))
    took = _timed(lambda: [_tell(events, ids, epoch) for epoch in range(ROUNDS - 60, ROUNDS + 1)])
    print(f"hearing 61 epochs of {PEERS} reports: {took * 1e6 / 61 / PEERS:.1f} µs a report")
    return watch


def _tell(events: Events, ids: list[PeerID], epoch: int) -> None:
    for peer in ids:
        events.emit(EpochReported(peer.text, epoch, 2.0, epoch * 4, 10.0))
    events.emit(EpochAdvanced(epoch, "ab", 4096, 0, 900, 2.0, 8.0, 0.3))


def _measure_parts(journal: Journal, watch: RunWatch, source: DashboardSource) -> None:
    def read(name: str, *args: Any, **options: Any) -> None:
        with journal.read() as reader:
            getattr(reader, name)(RUN, *args, **options)

    for name, work in {
        "a look at the run": watch.look,
        "totals of the journal": lambda: read("totals"),
        "600 epochs of a million": lambda: read("chart", limit=600),
        "the last 100 rounds": lambda: read("rounds", limit=100),
        "300 points of its history": lambda: read("moments"),
        "one peer's past": lambda: source.peer(source.look().peers[5].peer_id),
    }.items():
        print(f"{name}: {_median(work):.1f} ms")


def _median(work: Any, pause: float = 0.0) -> float:
    times = []
    for _ in range(TURNS):
        time.sleep(pause)
        times.append(_timed(work) * 1000)
    return statistics.median(times)


@contextlib.contextmanager
def _serving(source: DashboardSource) -> Iterator[str]:
    listener = listen("127.0.0.1", 0)
    with serving(lambda: create_app(source), [listener]):
        yield url_of(*listener.getsockname())


def _measure_requests(url: str) -> None:
    with httpx.Client(base_url=url + "api/v1/", timeout=60) as client:
        for path in ("state", "peers?limit=100&sort=-rate", "history", "epochs", "rounds", "failures"):
            pause = 0.3 if path == "state" else 0.0  # so that each look is a new one
            print(f"GET {path}: {_median(lambda path=path: client.get(path).raise_for_status(), pause):.1f} ms")


def _measure_paint(url: str) -> None:
    """Measures the first paint in a browser, if there is one."""
    try:
        from playwright.sync_api import sync_playwright

        named = map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))
        path = os.environ.get("SWARM_CHROMIUM") or next(filter(None, named), None)
    except ImportError:
        path = None
    if path is None:
        print("first paint: there is no browser (see tests/provide_chromium.sh)")
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        paints, shown = [], []
        for _ in range(5):
            page = browser.new_page()
            began = time.perf_counter()
            page.goto(url)
            page.wait_for_selector("body[data-connection=live]", timeout=30_000)
            shown.append((time.perf_counter() - began) * 1000)
            paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? NaN"))
            page.close()
        browser.close()
    print(f"first paint: {statistics.median(paints):.0f} ms; with the run's figures: {statistics.median(shown):.0f} ms")


async def _measure_pages(url: str) -> None:
    """Pages that are open all at once, each of which asks twice a second, while reports keep coming."""
    process, heard = psutil.Process(), 0

    async def follow() -> None:
        nonlocal heard
        async with httpx.AsyncClient(base_url=url + "api/v1/") as client:
            newest = (await client.get("rounds")).json()["rows"][-1]["id"]
            while True:
                for path in ("state", f"rounds?after={newest}"):
                    heard += len((await client.get(path)).content)
                await asyncio.sleep(0.5)

    tasks = [asyncio.create_task(follow()) for _ in range(VIEWERS)]
    await asyncio.sleep(3.0)
    before, cpu, started = process.memory_info().rss, sum(process.cpu_times()[:2]), heard
    await asyncio.sleep(PAGE_SECONDS)
    used = (sum(process.cpu_times()[:2]) - cpu) / PAGE_SECONDS
    grown, rate = (process.memory_info().rss - before) / MIB, (heard - started) / PAGE_SECONDS / 1000
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    print(f"{VIEWERS} open pages: {used:.0%} of a core, {rate:.0f} kB/s in all, memory {grown:+.1f} MiB")
    print(f"the process takes {before / MIB:.0f} MiB, threads {threading.active_count()}")


if __name__ == "__main__":
    sys.exit(main())
