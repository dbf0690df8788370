"""Time to a loss over home links: three trainers, 10.9 million parameters, links of 10, 50 and 100 Mbit/s.

Every trainer is a process in a network namespace behind a link of its own (tbf; see _namespaces.py). What is kept is
the model after each epoch, which is judged afterwards; a table says when each way came below each loss. Trainers share
the processors of one machine, so computing is slower than it would be, and sending weighs less.

    python -m benchmarks.wall [--mbit 10 50 100] [--seconds N] [--keep FILE.json] [WAY ...]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from benchmarks import _namespaces as namespaces
from benchmarks._wall import TRAINERS, Work, judged

_HERE = Path(__file__).parent
_PEERS_PYTHON = _HERE.parent / ".venv-peers" / "bin" / "python"
LOSSES = (3.0, 2.8, 2.6, 2.4, 2.2)  # nats per byte

# The way, batches of each trainer between two rounds, learning rate.
WAYS: dict[str, tuple[int, float]] = {
    "synchronous, float32": (4, 1e-3),
    "synchronous, 4 bits": (4, 1e-3),
    "PowerSGD": (4, 1e-3),
    "outer steps, 4 bits": (16, 1e-3),
    "outer steps with Muon, 4 bits": (16, 1e-2),
    "hivemind, PowerSGD": (4, 1e-3),
}


def run_trainer(pipe: Pipe, work: Work, mbit: float) -> None:
    os.setpgrp()
    work = replace(work, host=namespaces.settle(pipe, work.index, mbit))
    ours = [sys.executable, "-m", "benchmarks._wall_trainer"]
    theirs = [str(_PEERS_PYTHON), str(_HERE / "peers" / "wall_hivemind.py")]
    command = theirs if work.way.startswith("hivemind") else ours
    with (work.place / f"log-{work.index}").open("w") as log:
        subprocess.run([*command, work.told()], stdout=log, stderr=log, check=False)


def measure(way: str, mbit: float, seconds: float) -> list[tuple[float, int, float]]:
    """(seconds, epoch, loss) after each epoch."""
    every, rate = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        work = Work(way, folder, every, rate, seconds, epochs=1000)
        context = multiprocessing.get_context("spawn")
        processes, pipes = [], []
        for index in range(TRAINERS):
            mine, theirs = context.Pipe()
            process = context.Process(target=run_trainer, args=(theirs, replace(work, index=index), mbit))
            process.start()
            namespaces.connect(mine.recv(), index, mbit)
            mine.send("connected")
            processes.append(process)
            pipes.append(mine)
        for process in processes:
            process.join(seconds + 120)
            if process.pid is not None and process.is_alive():
                os.killpg(process.pid, 9)
        found = judged(work)
        if not found:
            print((work.place / "log-0").read_text()[-2000:], file=sys.stderr)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", default=list(WAYS), metavar="WAY")
    parser.add_argument("--mbit", type=float, nargs="+", default=[100.0, 50.0, 10.0])
    parser.add_argument("--seconds", type=float, default=300.0, help="of each way over each link")
    parser.add_argument("--keep", type=Path, help="what is in this file is not measured again")
    arguments = parser.parse_args()
    if not namespaces.inside():
        sys.exit(namespaces.rerun_inside("benchmarks.wall", sys.argv[1:]))
    namespaces.make_bridge()
    kept = json.loads(arguments.keep.read_text()) if arguments.keep and arguments.keep.exists() else {}
    print("| Mbit/s | way | epochs | " + " | ".join(f"to {loss}" for loss in LOSSES) + " |")
    for mbit in arguments.mbit:
        for way in arguments.ways:
            if (key := f"{way} | {mbit:g} | {arguments.seconds:g}") not in kept:
                kept[key] = measure(way, mbit, arguments.seconds)
                if arguments.keep:
                    arguments.keep.write_text(json.dumps(kept))
            when = [next((s for s, _, its in kept[key] if its <= loss), None) for loss in LOSSES]
            cells = " | ".join("—" if each is None else f"{each:.0f} s" for each in when)
            print(f"| {mbit:g} | {way} | {len(kept[key])} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
