"""How long `swarm join LINK` takes on this machine, until it asks and from the answer to the first gradient.

    python -m benchmarks.joining [--profile DIRECTORY]

A monitor and a trainer that takes a twentieth of the processor, in directories of their own, are the run. The newcomer
sits at a terminal of 80 columns and 24 lines, has a home of its own, and reads for five seconds what it is asked. It
joins with nothing kept here, with what another join has kept in the cache, likewise with `--yes`, and again where it
has been before. A first gradient is the first backward pass. `--profile` writes where the newcomer's main thread
spent its time.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import select
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import Popen

from benchmarks.shared_machine import RUN, epochs, until
from swarmcli.cli.processes import Children

RECIPE = Path(__file__).parents[1] / "recipes" / "stdlib-lm.yaml"
SIZE = struct.pack("HHHH", 24, 80, 0, 0)
READS = 5.0  # seconds that a person takes for the page
PATIENCE = 60.0  # seconds for a newcomer
# Notes the first gradient, without importing anything before its time.
NEWCOMER = """
import builtins, os, sys, time
real = builtins.__import__
def noting(name, *rest):
    found = real(name, *rest)
    loop = sys.modules.get("swarmcli.training.loop")
    if hasattr(loop, "TrainingLoop"):
        builtins.__import__ = real
        compute = loop.TrainingLoop._accumulate
        def first(self, batches):
            loop.TrainingLoop._accumulate = compute
            done = compute(self, batches)
            with open(os.environ["FIRST_GRADIENT"], "w") as file:
                file.write(str(time.time()))
            return done
        loop.TrainingLoop._accumulate = first
    return found
builtins.__import__ = noting
from swarmcli.cli.main import main
if path := os.environ.get("PROFILE"):
    import cProfile, atexit
    profile = cProfile.Profile()
    atexit.register(lambda: profile.dump_stats(path))
    profile.enable()
main()
"""


def join(link: str, places: Mapping[str, str], mark: Path, *words: str) -> tuple[float, float, bytes]:
    """Returns the seconds until it asks (0: it did not), those from there to the first gradient, and what stood on the
    terminal."""
    terminal, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, SIZE)
    mark.unlink(missing_ok=True)
    environment = {**os.environ, **places, "FIRST_GRADIENT": str(mark), "TERM": "xterm", "COLUMNS": "80"}
    began, asked, answered, screen = time.time(), 0.0, 0.0, b""
    command = [sys.executable, "-c", NEWCOMER, "join", link, *words]
    with Popen(command, stdin=side, stdout=side, stderr=side, env=environment, start_new_session=True) as process:
        os.close(side)
        try:
            while not (mark.exists() and mark.read_text()) and time.time() < began + PATIENCE:
                if select.select([terminal], [], [], 0.02)[0]:
                    with suppress(OSError):  # it has ended
                        screen += os.read(terminal, 1 << 16)
                if not asked and b"[y/N]" in screen:
                    asked = time.time() - began
                if asked and not answered and time.time() > began + asked + READS:
                    os.write(terminal, b"y\n")
                    answered = time.time()
                if process.poll() is not None:
                    sys.exit(f"it ended:\n{screen.decode(errors='replace')}")
            gradient = float(mark.read_text())
            process.terminate()
            while process.poll() is None:
                if select.select([terminal], [], [], 0.1)[0]:
                    with suppress(OSError):
                        os.read(terminal, 1 << 16)
        finally:
            process.kill()
            os.close(terminal)
    page, _, _ = screen.partition(b"[y/N]")
    return asked, gradient - (answered or began), page


def measure(directory: Path, profiles: Path | None) -> None:
    """Prints a line for each way to join."""
    with Children() as children:
        link = start_run(directory, children)
        for way, kept, words in (
            ("nothing kept", "first", []),
            ("what another join kept in the cache", "second", []),
            ("the same with --yes", "third", ["--yes"]),
            ("again, in the same home", "third", []),
        ):
            places = {
                "SWARM_DATA_DIR": str(directory / kept),
                "SWARM_RUNTIME_DIR": str(directory / "runtime-of-newcomer"),
            }
            if profiles is not None:
                places["PROFILE"] = str(profiles / f"{way.replace(' ', '-')}.profile")
            asked, computed, page = join(link, places, directory / "gradient", *words)
            lines = page.count(b"\n") + 1
            shown = f"{asked:5.1f} s to the question, on a page of {lines} lines" if asked else "not asked"
            print(f"  {way:38} {computed:5.1f} s to the first gradient; {shown}", flush=True)


def start_run(directory: Path, children: Children) -> str:
    """Starts a monitor and a trainer; returns the monitor's link, once the trainer contributes."""

    def start(verb: str, name: str, *more: str) -> None:
        settings = [f"run_id={RUN}", "max_epochs=1000000", "target_batch_size=64", "local.host=127.0.0.1"]
        words = [
            verb,
            str(RECIPE),
            "--home",
            str(directory / name),
            *(w for s in settings for w in ("--set", s)),
            *more,
        ]
        children.start(name, words, directory / f"{name}.log", {"SWARM_RUNTIME_DIR": str(directory / "runtime")})

    start("monitor", "monitor", "--web", "0", "--port", "0")
    until(lambda: (directory / "monitor" / "link").exists())
    link, _, _ = (directory / "monitor" / "link").read_text().partition("\n")
    address = json.loads((directory / "monitor" / "peer.json").read_text())["addresses"][0]
    start("join", "trainer", "--peer", address, "--limit", "processor=5%")
    until(lambda: len(epochs(directory / "trainer")) > 3)
    return link


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path)
    arguments, _ = parser.parse_known_args()
    print(f"{len(os.sched_getaffinity(0))} cores; {RECIPE.name}")
    with tempfile.TemporaryDirectory() as directory:
        measure(Path(directory), arguments.profile)


if __name__ == "__main__":
    main()
