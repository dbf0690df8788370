"""What the tests cost, by folder and by kind.

pytest -p tests.costs --costs DIR ...        writes one file for each worker into DIR
python tests/costs.py DIR [FOLDER ...]       adds them up; of a folder, its files
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@dataclass
class Cost:
    """Of one test, or of what a worker does before the first one."""

    test: str
    kind: str
    searches: bool  # seeds, or examples that hypothesis draws
    processor: float  # seconds, of the worker and of the processes that it has waited for
    wall: float  # seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="DIR", help="a directory, for python tests/costs.py")


def pytest_configure(config: pytest.Config) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if config.getoption("--costs") and (worker or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(Meter(Path(config.getoption("--costs")) / f"{worker or 'alone'}.jsonl"))


class Meter:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.costs: list[Cost] = []
        self.seen = set[str]()  # what the running test has made

    def pytest_collection_finish(self) -> None:
        from swarmcli.testing.virtual_time import VirtualTimeLoop

        self.costs.append(Cost("collection", "imports", False, _processor(), 0.0))
        _note(VirtualTimeLoop, "__init__", lambda self_: self.seen.add("virtual time"))
        _note(threading.Thread, "start", self._see_thread)

    def _see_thread(self, thread: threading.Thread) -> None:
        if thread.name.startswith("swarm"):
            self.seen.add("real threads")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.seen.clear()
        processor, wall, children = _processor(), time.perf_counter(), _children()
        result = yield
        if _children() > children or item.get_closest_marker("e2e"):
            self.seen.add("processes")
        kind = next((kind for kind in ("processes", "virtual time", "real threads") if kind in self.seen), "plain")
        matrix = getattr(item, "callspec", None)
        searches = hasattr(getattr(item, "obj", None), "hypothesis") or bool(matrix and "seed" in matrix.params)
        self.costs.append(Cost(item.nodeid, kind, searches, _processor() - processor, time.perf_counter() - wall))
        return result

    def pytest_sessionfinish(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(json.dumps(asdict(cost)) + "\n" for cost in self.costs))


def _note(owner: type, name: str, note) -> None:  # type: ignore[no-untyped-def]
    original = getattr(owner, name)

    def noting(self, *arguments, **keywords):  # type: ignore[no-untyped-def]
        note(self)
        return original(self, *arguments, **keywords)

    setattr(owner, name, noting)


def _children() -> float:
    spent = os.times()
    return spent.children_user + spent.children_system


def _processor() -> float:
    return time.process_time() + _children()


def read(directory: Path) -> list[Cost]:
    return [Cost(**json.loads(line)) for path in sorted(directory.glob("*.jsonl")) for line in path.open()]


def table(title: str, costs: Iterable[tuple[str, Cost]], shown: int) -> None:
    processor, wall, tests = defaultdict[str, float](float), defaultdict[str, float](float), defaultdict[str, int](int)
    for name, cost in costs:
        processor[name] += cost.processor
        wall[name] += cost.wall
        tests[name] += 1
    print(f"\n| {title} | tests | processor, s | wall, s |\n| --- | --- | --- | --- |")
    for name in sorted(processor, key=lambda name: -processor[name])[:shown]:
        print(f"| {name} | {tests[name]:,} | {processor[name]:.1f} | {wall[name]:.1f} |")
    print(f"| together | {sum(tests.values()):,} | {sum(processor.values()):.1f} | {sum(wall.values()):.1f} |")


def main(directory: str, *folders: str) -> None:
    costs = read(Path(directory))
    if not folders:
        table("folder", ((_folder(cost.test), cost) for cost in costs), 60)
        table("kind", ((cost.kind, cost) for cost in costs), 10)
        table("searches", (("seeds, drawn examples" if cost.searches else "others", cost) for cost in costs), 10)
    for folder in folders:
        inside = [cost for cost in costs if cost.test.startswith(folder)]
        table("file", ((cost.test.split("::")[0], cost) for cost in inside), 60)
        table("test", ((cost.test.split("[")[0].split("/")[-1], cost) for cost in inside), 60)


def _folder(test: str) -> str:
    path = test.split("::")[0].split("/")
    return "tests/" + path[1] if len(path) > 2 else path[-1]


if __name__ == "__main__":
    main(*sys.argv[1:])
