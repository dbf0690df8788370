"""One to three trainers on this machine, each as `swarm join` starts it: epochs per second of their run.

With default settings, with one thread each, and with what torch and its OpenMP do by themselves. All three for one
number of trainers follow each other, so that they meet the same machine.

    python -m benchmarks.shared_machine
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from swarmcli.cli.processes import Children
from swarmcli.errors import JournalError
from swarmcli.events import EpochAdvanced
from swarmcli.journal import JOURNAL_NAME, JournalReader

RECIPE = Path(__file__).parents[1] / "recipes" / "stdlib-lm.yaml"
RUN = "shared-machine"
SECONDS = 10.0  # seconds that are counted, from when the last trainer has contributed
PATIENCE = 120.0  # seconds until then


@dataclass(frozen=True, eq=False)
class Way:
    """How the trainers are started."""

    name: str
    overrides: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


OURS = Way("swarm")
ONE_THREAD = Way("one thread each", overrides=("local.threads=1",))
TORCH = Way(
    "as torch does",  # 300,000 turns are what GNU's OpenMP waits if nobody says otherwise
    environment={"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "GOMP_SPINCOUNT": "300000"},
)


def epochs_per_second(trainers: int, way: Way) -> float:
    """The epochs per second of a run of so many trainers, while all of them contribute."""
    with tempfile.TemporaryDirectory() as directory, Children() as children:
        homes = [Path(directory) / f"trainer-{number}" for number in range(trainers)]
        settings = [f"run_id={RUN}", "max_epochs=100000", "local.host=127.0.0.1", *way.overrides]
        # The peers of another run on this machine would take their share; those of the benchmark see each other alone.
        environment = {"SWARM_RUNTIME_DIR": f"{directory}/runtime", **way.environment}
        contact: list[str] = []
        for home in homes:
            words = ["join", str(RECIPE), "--home", str(home), *contact]
            words += [word for setting in settings for word in ("--set", setting)]
            children.start(home.name, words, home.with_suffix(".log"), environment)
            if not contact:
                until(lambda: (homes[0] / "peer.json").exists())
                contact = ["--peer", json.loads((homes[0] / "peer.json").read_text())["addresses"][0]]
        until(lambda: all(contributes(home) for home in homes))
        began = time.time()
        time.sleep(SECONDS)
        counted = [epoch.time for epoch in epochs(homes[0]) if epoch.time >= began]
        return (len(counted) - 1) / (counted[-1] - counted[0]) if len(counted) > 1 else 0.0


def epochs(home: Path) -> list[EpochAdvanced]:
    try:
        with JournalReader(home / JOURNAL_NAME) as journal:
            return journal.epochs(RUN)
    except JournalError:  # not there yet
        return []


def contributes(home: Path) -> bool:
    """Whether the peer is past its first epochs, of which some are short and some wait for others."""
    return sum(epoch.own_samples > 0 for epoch in epochs(home)) > 3


def until(condition: Callable[[], bool], patience: float = PATIENCE) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"the trainers did not come so far within {patience:.0f} s")
        time.sleep(0.2)


def main() -> None:
    print(f"{len(os.sched_getaffinity(0))} cores; {RECIPE.name}; epochs per second, and the ratio to the others")
    for trainers in (1, 2, 3):
        rates = {way: epochs_per_second(trainers, way) for way in (OURS, ONE_THREAD, TORCH)}
        others = ", ".join(
            f"{way.name} {rates[way]:.2f} ({rates[OURS] / rates[way]:.2f})" if rates[way] else f"{way.name}: none"
            for way in (ONE_THREAD, TORCH)
        )
        print(f"  {trainers} trainers: swarm {rates[OURS]:.2f}; {others}", flush=True)


if __name__ == "__main__":
    main()
