"""Unlike volunteers: what a trainer with a slow uplink costs those who train with it, and when it finds out.

    python -m benchmarks.unlike [--seconds 60] [--quick 1] [--target 256] [--only link]

Hosts in network namespaces: a monitor and `--quick` trainers; the same with one more trainer, whose uplink is limited
to 10 kB/s from its start, or while it runs, or whose link lets 80 kbit/s pass and keeps what waits for 400 ms, which no
limit tells of. Prints the epochs that the first trainer makes in that time, the longest of them, and their ratio to
what it makes without the slow one; and what the slow one was told, and when. With `--quick 4 --target 4096` it is five
peers with epochs of some ten seconds. Each host is a computer of its own: its peers know none of the others', and
compute with one thread. What runs beside it on the machine counts: nothing should.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._homes import Internet, missing
from swarmcli.cli.processes import Children
from tests.end_to_end.swarm import RECIPE, Swarm

WARM_UP = 5  # epochs that are not counted
SIZE = {"n_layer: 1": "n_layer: 3", "n_embd: 32": "n_embd: 96"}  # 0.4 million parameters: a round sends 1.6 MB
UPLOAD = "10kB/s"
LINE = 0.08, 400, 4  # Mbit/s, milliseconds of its queue, kB of its burst
CASES = {"alone": "", "limit": "limited from its start", "later": "limited while it runs", "link": "behind a slow link"}


def measure(directory: Path, case: str, seconds: float, quick: int, target: int) -> tuple[int, float, float]:
    """Returns how many epochs the first trainer ends in so many seconds, and the seconds of the longest and of the
    median one."""
    with Children() as children, Internet() as internet:
        recipe = RECIPE
        for small, larger in SIZE.items():
            recipe = recipe.replace(small, larger)
        run = Swarm(directory, children, max_epochs=100_000, target=target, host="0.0.0.0")
        run.recipe.write_text(recipe.format(max_epochs=100_000, target=target, host="0.0.0.0", rate=3e-3))
        run.start_contact("monitor", "monitor", "--web", "0", **_host(internet, directory, "monitor"))
        names = [f"quick{number}" for number in range(quick)]
        trainers = [run.start("join", name, **_host(internet, directory, name)) for name in names]
        run.wait_for_epoch(names[0], WARM_UP, *trainers)
        began = time.time()
        if case != "alone":
            words = ["--limit", f"upload={UPLOAD}"] if case == "limit" else []
            slow = run.start("join", "slow", *words, **_host(internet, directory, "slow", slow=case == "link"))
            if case == "later":
                run.wait(lambda: any(each.own_samples for each in run.epochs("slow")), "the slow one trains", slow)
                began = time.time()
                _config(directory, "slow").write_text(f"limits:\n  upload: {UPLOAD}\n")
        first = run.epoch(names[0])
        time.sleep(seconds)
        epochs = [each.seconds for each in run.epochs(names[0]) if each.epoch > first]
        for line in run.events("slow") if case != "alone" else ():
            if line.level != "detail" and line.time >= began:
                print(f"      the slow one after {line.time - began:.0f} s: {line.text}")
        return len(epochs), max(epochs, default=seconds), statistics.median(epochs or [seconds])


def _host(internet: Internet, directory: Path, name: str, *, slow: bool = False) -> dict[str, Any]:
    """Makes a host; returns the arguments that start a peer on it."""
    places = {"SWARM_RUNTIME_DIR": str(directory / f"{name}-runtime"), "SWARM_CONFIG": str(_config(directory, name))}
    machine = internet.machine(name)
    if slow:
        machine.site.shape(*LINE)
    return {"prefix": machine.prefix, "environment": {**places, "OMP_NUM_THREADS": "1"}}


def _config(directory: Path, name: str) -> Path:
    return directory / f"{name}-config.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--quick", type=int, default=1)
    parser.add_argument("--target", type=int, default=256)
    parser.add_argument("--only", choices=CASES, action="append", default=[])
    arguments = parser.parse_args()
    if (reason := missing()) is not None:
        sys.exit(reason)
    alone = 0
    for case in ["alone", *arguments.only] if arguments.only else CASES:
        with tempfile.TemporaryDirectory() as directory:
            epochs, longest, usual = measure(
                Path(directory), case, arguments.seconds, arguments.quick, arguments.target
            )
        alone = alone or epochs
        print(
            f"{CASES[case] or case:24} {epochs:4} epochs in {arguments.seconds:.0f} s, usual {usual:.2f} s, longest "
            f"{longest:.1f} s, {epochs / max(1, alone):.2f} of those alone",
            flush=True,
        )


if __name__ == "__main__":
    main()
