"""This version beside an earlier one, turn by turn on the same machine: calls, stores, rounds.

All peers are in one process on the loopback interface. Printed are, for each piece of work, the seconds that pass and
the processor seconds of all peers together, each with the ratio of the medians.

    python -m benchmarks earlier          beside cc4ff9c, the last version that trusted its members
    EARLIER=<commit> python -m benchmarks earlier
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

TURNS = 5
ROOT = Path(__file__).parents[1]
WORKS = ROOT / "benchmarks" / "_earlier_works.py"


def main() -> None:
    commit = os.environ.get("EARLIER", "cc4ff9c")
    with tempfile.TemporaryDirectory() as directory:
        earlier = Path(directory) / "earlier"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", earlier, commit], cwd=ROOT, check=True)
        try:
            _compare(earlier, commit)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", earlier], cwd=ROOT, check=True)


def _compare(earlier: Path, commit: str) -> None:
    found: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(TURNS):
        for name, tree in (("now", ROOT), ("earlier", earlier)):
            for work, spent in _run(tree).items():
                found[work][name].append(spent)
    print(f"{'':36} {commit:>22} {'now':>22} {'ratio':>12}   (seconds passed, of processors)")
    for work, sides in found.items():
        before, now = (tuple(map(statistics.median, zip(*sides[name], strict=True))) for name in ("earlier", "now"))
        print(
            f"{work:36} {before[0]:10.3f} {before[1]:10.3f}  {now[0]:10.3f} {now[1]:10.3f}  "
            f"{now[0] / before[0]:6.2f} {now[1] / before[1]:6.2f}"
        )


def _run(tree: Path) -> dict[str, tuple[float, float]]:
    # The tree comes first in the path: what the environment puts there may hold this version.
    begin = f"import runpy, sys; sys.path.insert(0, {str(tree)!r}); runpy.run_path({str(WORKS)!r}, run_name='__main__')"
    told = subprocess.run([sys.executable, "-c", begin], cwd=tree, capture_output=True, text=True, check=True)
    return {work: tuple(spent) for work, spent in json.loads(told.stdout).items()}
