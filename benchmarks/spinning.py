"""Samples per second, by how many turns threads of an OpenMP team wait for each other before they sleep.

Plain loops of torch and trainers as `swarm join` starts them, one or two, alone or beside two programs that keep the
processors busy, for each number of turns. GNU's library reads that number once, as torch is loaded. "swarm" is what
this project sets.

    python -m benchmarks.spinning [TURNS ...]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from benchmarks._contest import Crew
from benchmarks.lone import RUN, of_swarm, plain
from swarmcli.recipe.templates import compose

TURNS = ("1001", "10000", "100000", "300000", "swarm")  # 300,000: as torch does
NAME = "GOMP_SPINCOUNT"


@contextmanager
def turning(turns: str) -> Iterator[None]:
    """Processes that are started in this block wait for so many turns."""
    with patch.dict(os.environ):
        for name in (NAME, "KMP_BLOCKTIME"):
            os.environ.pop(name, None)
        if turns != "swarm":
            os.environ[NAME] = turns
        yield


@contextmanager
def busy(programs: int = 2) -> Iterator[None]:
    """So many other programs compute in this block."""
    begun = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(programs)]
    try:
        yield
    finally:
        for each in begun:
            each.kill()
            each.wait()


def of_loops(path: Path, count: int) -> float:
    """Samples per second of so many plain loops that import swarmcli, together."""
    crew = Crew(plain, count, str(path))
    try:
        return float(sum(crew.ask()))
    finally:
        crew.end()


def measure(path: Path) -> Iterator[float]:
    yield of_loops(path, 1)
    yield of_loops(path, 2)
    yield of_swarm(path)
    yield of_swarm(path, 2)
    with busy():
        yield of_loops(path, 1)
        yield of_swarm(path)


def main(wanted: Sequence[str] = ()) -> None:
    print(f"{len(os.sched_getaffinity(0))} cores; samples per second")
    print("  turns      a loop  two loops  a trainer  two  beside busy programs: a loop  a trainer")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "run.yaml")
        path.write_text(compose("run.yaml", RUN))
        for turns in wanted or TURNS:
            with turning(turns):
                print(f"  {turns:>8}" + "".join(f"{rate:>10.0f}" for rate in measure(path)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
