"""A lone trainer as a user starts it, beside a plain loop of torch over the same model, data and batches.

Prints samples per second, measured in turns; also those of two trainers beside a monitor, added up.

    python -m benchmarks.lone [template] [recipe] [monitor]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import cycle, islice
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import torch

from benchmarks._contest import Crew
from benchmarks.shared_machine import RUN, TORCH, contributes, epochs, until
from swarmcli.cli.processes import Children
from swarmcli.events import EpochAdvanced
from swarmcli.recipe import load_recipe
from swarmcli.recipe.templates import compose
from swarmcli.training import build_scheduler, build_task, optimizer_factory, parameter_groups

RECIPE = Path(__file__).parents[1] / "recipes" / "stdlib-lm.yaml"
SETTINGS = (f"run_id={RUN}", "max_epochs=100000")
SECONDS = 10.0  # of each turn that are counted
TURNS = 2
DRAWN = 256  # micro-batches that the plain loop has in memory and goes over again and again


def plain(pipe: Pipe, index: int, path: str) -> None:
    """Answers with the samples per second of a loop without any swarm."""
    pipe.send(None)
    recipe = load_recipe(path, SETTINGS)
    task = build_task(recipe)
    model = task.build_model()
    optimizer = optimizer_factory(recipe)(parameter_groups(recipe, model))
    scheduler = build_scheduler(recipe, optimizer)
    batches = cycle(list(islice(task.batches(1), DRAWN)))
    steps = recipe.target_batch_size // recipe.micro_batch_size
    pipe.recv(), pipe.recv()

    def batch() -> None:
        losses = []
        for _ in range(steps):
            loss = task.loss(model, next(batches))
            (loss / steps).backward()
            losses.append(loss.detach())
        torch.stack(losses).mean().item()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    batch()
    began, done = time.perf_counter(), 0
    while time.perf_counter() < began + SECONDS:
        batch()
        done += steps * recipe.micro_batch_size
    pipe.send(done / (time.perf_counter() - began))


def of_plain(path: Path) -> float:
    """Samples per second of the plain loop, with as many threads as torch takes, which wait for each other as torch has
    them wait."""
    os.environ.update(TORCH.environment)
    crew = Crew(plain, 1, str(path))
    try:
        return float(crew.ask()[0])
    finally:
        crew.end()
        for name in TORCH.environment:
            del os.environ[name]


def of_swarm(path: Path, trainers: int = 1, *, monitor: bool = False) -> float:
    """Samples per second of a run of its own, all trainers together."""
    with tempfile.TemporaryDirectory() as directory, Children() as children:
        # Peers of other runs of this user would take their share.
        environment = {"SWARM_RUNTIME_DIR": f"{directory}/runtime"}
        settings = [word for each in SETTINGS for word in ("--set", each)]
        homes = [Path(directory, f"trainer-{number}") for number in range(trainers)]
        everyone = [(Path(directory, "monitor"), "monitor"), *((home, "join") for home in homes)][not monitor :]
        contact: list[str] = []
        for home, verb in everyone:
            words = [verb, str(path), "--home", str(home), *contact, *settings]
            children.start(home.name, words, home.with_suffix(".log"), environment)
            if not contact and len(everyone) > 1:
                until((home / "peer.json").exists)
                contact = ["--peer", json.loads((home / "peer.json").read_text())["addresses"][0]]
        until(lambda: all(contributes(home) for home in homes))
        began = time.time()
        time.sleep(SECONDS)
        until(lambda: all(len(since(home, began)) > 1 for home in homes))  # a busy machine takes longer
        rate = 0.0
        for home in homes:
            counted = since(home, began)
            rate += sum(epoch.own_samples for epoch in counted[1:]) / (counted[-1].time - counted[0].time)
        return rate


def since(home: Path, began: float) -> list[EpochAdvanced]:
    return [epoch for epoch in epochs(home) if epoch.time >= began]


def compare(name: str, path: Path, trainers: int = 1, *, monitor: bool = False) -> None:
    print(f"  {name}", flush=True)
    ratios = []
    for _ in range(TURNS):
        theirs, ours = of_plain(path), of_swarm(path, trainers, monitor=monitor)
        ratios.append(ours / theirs)
        print(f"    {ours:.0f}, plain {theirs:.0f}: {ratios[-1]:.2f}", flush=True)
    print(f"    in the middle {statistics.median(ratios):.2f} (load {os.getloadavg()[0]:.1f})", flush=True)


def _template() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "run.yaml")
        path.write_text(compose("run.yaml", RUN))
        compare("small template, one trainer", path)


CASES = {
    "template": _template,
    "recipe": lambda: compare(f"{RECIPE.name}, one trainer", RECIPE),
    "monitor": lambda: compare(f"{RECIPE.name}, a monitor and two trainers", RECIPE, 2, monitor=True),
}


def main(wanted: Sequence[str] = ()) -> None:
    unknown = set(wanted) - set(CASES)
    if unknown:
        sys.exit(f"no such case: {', '.join(sorted(unknown))}; there are: {', '.join(CASES)}")
    print(f"{len(os.sched_getaffinity(0))} cores; samples per second (and of a plain loop's)", flush=True)
    for name in wanted or CASES:
        CASES[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
