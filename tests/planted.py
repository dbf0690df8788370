"""Faults planted on purpose, one for each promise: do the tests catch them?

    python tests/planted.py [NAME ...]

Each tests/planted/NAME.patch breaks one promise of docs/. Its head names the promise and the test files that must
catch it. In a copy of this checkout each patch is applied by itself, and those files are run until the first failure.
Before that they must pass as they are. It fails if a patch no longer applies, if no test catches it, or if a file
fails without it. A test that hangs for two minutes counts as caught.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
PATCHES = ROOT / "tests" / "planted"
SUITE = "(not e2e or smoke) and not soak"  # what `make test` runs
HANGS = 120  # seconds of one test
AT_ONCE = max(1, min(8, os.cpu_count() or 1))


@dataclass(frozen=True)
class Planted:
    path: Path
    promise: str
    tests: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Planted:
        head, _, _ = path.read_text().partition("\n--- ")
        said = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
        if not said.get("Promise") or not said.get("Tests"):
            sys.exit(f"{path.name} begins with the lines 'Promise: …' and 'Tests: FILE [FILE]'")
        return cls(path, said["Promise"], tuple(said["Tests"].split()))

    @property
    def name(self) -> str:
        return self.path.stem

    def apply(self, place: Path, *options: str) -> str:
        """Applies the patch to the checkout at `place`. Returns what git complains of; "": nothing."""
        done = subprocess.run(
            ("git", "apply", "--whitespace=nowarn", *options, str(self.path)),
            cwd=place,
            # Below a repository of somebody else `git apply` would leave out what is not in it, and say nothing.
            env={**os.environ, "GIT_CEILING_DIRECTORIES": str(place.parent)},
            capture_output=True,
            text=True,
        )
        return done.stderr


class Copy:
    """A checkout in which one fault at a time is planted."""

    def __init__(self, place: Path) -> None:
        self.place = place
        listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
            source, target = ROOT / name, place / name
            if name and source.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)

    def run(self, tests: tuple[str, ...], *options: str) -> subprocess.CompletedProcess[str]:
        """pytest in a process group of its own, so that nothing of it is left."""
        words = (sys.executable, "-m", "pytest", "-x", "-q", "-m", SUITE, f"--timeout={HANGS}", *options, *tests)
        environment = {**os.environ, "PYTHONPATH": str(self.place), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            words, cwd=self.place, env=environment, capture_output=True, text=True, start_new_session=True
        )


def judge(copy: Copy, planted: Planted) -> str | None:
    """What is wrong with the tests, or with the patch."""
    if lost := [test for test in planted.tests if not (copy.place / test).exists()]:
        return f"names {', '.join(lost)}, which is not there"
    if complaint := planted.apply(copy.place):
        return f"no longer applies: {complaint.strip()}"
    try:
        done = copy.run(planted.tests)
    finally:
        planted.apply(copy.place, "--reverse")
    if done.returncode == 1:
        return None
    said = "nothing catches it" if done.returncode == 0 else f"pytest ended with {done.returncode}"
    return f"{said}:\n{done.stdout[-2_000:]}{done.stderr[-2_000:]}"


def main(names: list[str]) -> str | None:
    paths = sorted(PATCHES.glob("*.patch"))
    if unknown := set(names) - {path.stem for path in paths}:
        return f"no such patch: {', '.join(sorted(unknown))}"
    everything = [Planted.read(path) for path in paths if not names or path.stem in names]
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(AT_ONCE) as pool:
        free = SimpleQueue[Copy]()
        for number in range(AT_ONCE):
            free.put(Copy(Path(directory, f"copy-{number}")))
        copy = free.get()
        files = sorted({test for planted in everything for test in planted.tests if (copy.place / test).exists()})
        sound = copy.run(tuple(files), "-n", str(AT_ONCE))
        free.put(copy)
        if sound.returncode:
            return f"without any fault:\n{sound.stdout[-4_000:]}{sound.stderr[-2_000:]}"

        def told(planted: Planted) -> bool:
            copy, began = free.get(), time.monotonic()
            try:
                wrong = judge(copy, planted)
            finally:
                free.put(copy)
            verdict = f"NOT CAUGHT, {wrong}" if wrong else "caught"
            print(f"{planted.name} ({planted.promise}): {verdict} [{time.monotonic() - began:.0f} s]", flush=True)
            return wrong is None

        caught = list(pool.map(told, everything))
    print(f"{sum(caught)} of {len(caught)} caught")
    return None if all(caught) else "some are not"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
