"""Each task's small recipe by three trainers, of which one comes late and one is killed, beside one process with as
many samples: what the monitor measures on data that nobody trained on.

    python recipes/make_data.py && python -m benchmarks.models [recipe …] [--write benchmarks/NOTES.md]
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.shared_machine import until
from swarmcli.cli.processes import Children
from swarmcli.errors import JournalError
from swarmcli.events import Evaluated
from swarmcli.journal import JOURNAL_NAME, JournalReader
from swarmcli.recipe import load_recipe
from swarmcli.training import Compute, build_scheduler, build_task, optimizer_factory, parameter_groups
from swarmcli.training.loop import evaluate

RECIPES = Path(__file__).parents[1] / "recipes"
NAMES = ("masked-lm", "sequence-classification", "token-classification", "seq2seq", "image-classification", "chat")
EPOCHS, TARGET = 60, 128
SETTINGS = (
    f"max_epochs={EPOCHS}", f"target_batch_size={TARGET}", "micro_batch_size=8", f"evaluation.every_epochs={EPOCHS}",
    "checkpoint.every_epochs=0", "local.host=127.0.0.1",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    loss: float
    metrics: dict[str, float]
    equal: bool = True  # the parameters of the monitor and of all survivors

    def __str__(self) -> str:
        told = {"loss": self.loss, **self.metrics}  # perplexity is e to the power of the loss
        return ", ".join(f"{name} {value:.3f}" for name, value in told.items() if name != "perplexity")


def together(name: str) -> Outcome:
    """A monitor and three trainers: the third comes at a quarter of the run, one of the first is killed at half."""
    with tempfile.TemporaryDirectory() as directory, Children() as children:
        homes = {each: Path(directory) / each for each in ("monitor", "first", "second", "late")}
        contact: list[str] = []

        def start(verb: str, peer: str, *more: str) -> None:
            words = [verb, str(RECIPES / f"{name}.yaml"), "--home", str(homes[peer]), *contact, *more]
            words += [word for setting in SETTINGS for word in ("--set", setting)]
            started[peer] = children.start(
                peer, words, homes[peer].with_suffix(".log"), {"SWARM_RUNTIME_DIR": f"{directory}/runtime"}
            )

        def epoch(peer: str) -> int:
            try:
                with JournalReader(homes[peer] / JOURNAL_NAME) as journal:
                    return max((each.epoch for each in journal.epochs(name)), default=0)
            except JournalError:
                return 0

        def measured() -> list[Evaluated]:
            with JournalReader(homes["monitor"] / JOURNAL_NAME) as journal:
                return journal.evaluations(name)

        started = {}
        start("monitor", "monitor", "--port", "0")
        until(lambda: (homes["monitor"] / "peer.json").exists())
        contact += ["--peer", json.loads((homes["monitor"] / "peer.json").read_text())["addresses"][0]]
        for peer in ("first", "second"):
            start("join", peer)
        until(lambda: epoch("monitor") >= EPOCHS // 4, patience=600)
        start("join", "late")
        until(lambda: epoch("monitor") >= EPOCHS // 2, patience=600)
        started["second"].kill()
        until(lambda: all(started[peer].returncode is not None for peer in ("first", "late")), patience=600)
        until(lambda: bool(measured()), patience=300)
        started["monitor"].ask_to_stop()
        until(lambda: started["monitor"].returncode is not None)
        last = measured()[-1]
        digests = {
            json.loads((homes[peer] / "summary.json").read_text())["digest"] for peer in ("monitor", "first", "late")
        }
        return Outcome(last.loss, dict(last.metrics), len(digests) == 1)


def alone(name: str) -> Outcome:
    """A plain loop over as many samples, with the same optimizer and schedule."""
    recipe = load_recipe(RECIPES / f"{name}.yaml", SETTINGS)
    task = build_task(recipe)
    model = task.build_model()
    optimizer = optimizer_factory(recipe)(parameter_groups(recipe, model))
    scheduler = build_scheduler(recipe, optimizer)
    batches = iter(task.batches(1))
    for _ in range(EPOCHS):
        steps = TARGET // recipe.micro_batch
        for batch in itertools.islice(batches, steps):
            (task.loss(model, batch) / steps).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    stop = threading.Event()
    result = evaluate(task, model, task.evaluation_batches(), Compute(torch.device("cpu")), stop.is_set)
    assert result is not None
    return Outcome(result.loss, dict(result.metrics))


def main() -> None:
    names = [name for name in sys.argv[1:] if name in NAMES] or list(NAMES)
    lines = [
        "recipe | three trainers, one late, one killed | one process",
        "--- | --- | ---",
    ]
    for name in names:
        ours, single = together(name), alone(name)
        survivors = "" if ours.equal else " (survivors **differ**)"
        lines.append(f"`{name}`{survivors} | {ours} | {single}")
        print(lines[-1], flush=True)
    if "--write" in sys.argv:
        file = Path(sys.argv[sys.argv.index("--write") + 1])
        before, mark, rest = file.read_text().partition("<!-- measured -->\n")
        after = rest.partition("<!-- end -->")[2]
        file.write_text(f"{before}{mark}" + "\n".join(lines) + f"\n<!-- end -->{after}")


if __name__ == "__main__":
    main()
