"""The shipped recipes of each mode, as people run them: two trainers, and a monitor that follows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from swarmcli.events import RoundFinished
from swarmcli.journal import JOURNAL_NAME, JournalReader
from tests.end_to_end.swarm import Swarm

RECIPES = Path(__file__).parents[2] / "recipes"
EPOCHS = 6
SMALLER = {
    "base_model.n_layer": 1,
    "base_model.n_embd": 32,
    "base_model.n_head": 2,
    "sequence_len": 32,
    "target_batch_size": 2048,  # long enough for both trainers to start
    "max_epochs": EPOCHS,
    "lr_scheduler.warmup_epochs": 2,
    "local.host": "127.0.0.1",
}
OVERRIDES = [word for key, value in SMALLER.items() for word in ("--set", f"{key}={value}")]
TASKS = {
    "chat", "image-classification", "lora", "masked-lm", "seq2seq", "sequence-classification", "token-classification",
}  # fmt: skip
MODES = {"compressed", "delayed", "local-updates", "outer-steps", "powersgd", "poweref", "sparse", "sparse-outer"}
# Made larger than 2 MiB, so that their ends of epochs run in threads beside their trainers.
LARGER = {"delayed", "outer-steps", "sparse-outer"}


def rounds(run: Swarm, name: str, recipe: str) -> list[RoundFinished]:
    with JournalReader(run.home(name) / JOURNAL_NAME) as journal:
        return journal.rounds(recipe)


@pytest.mark.e2e
@pytest.mark.soak
@pytest.mark.parametrize("recipe", sorted(MODES))
def test_two_trainers_and_a_monitor_end_with_the_same_parameters(swarm: Callable[..., Swarm], recipe: str) -> None:
    run = swarm(EPOCHS)
    run.recipe = RECIPES / f"{recipe}.yaml"
    size = ("--set", "base_model.n_embd=256", "--set", "sequence_len=16") if recipe in LARGER else ()
    monitor = run.start_monitor(*OVERRIDES, *size)
    trainers = [run.start("join", name, *OVERRIDES, *size) for name in ("trainer-1", "trainer-2")]
    for trainer in trainers:
        run.wait_for_end(trainer)
    monitor.ask_to_stop()
    run.wait_for_end(monitor)

    summaries = [run.summary(name) for name in ("monitor", "trainer-1", "trainer-2")]
    assert {summary["epoch"] for summary in summaries} == {EPOCHS}
    assert len({summary["digest"] for summary in summaries}) == 1, run.last_words()
    averaged = "_state" if recipe == "local-updates" else "_grads"
    seen = [each for each in rounds(run, "trainer-1", recipe) if each.purpose.endswith(averaged)]
    assert any(each.outcome == "committed" and len(each.members) == 3 for each in seen), seen


def test_every_mode_has_a_recipe() -> None:
    assert {file.stem for file in RECIPES.glob("*.yaml")} == MODES | {
        "stdlib-lm",
        "wikitext-lm",
        "continue-local",
        "site",  # in test_site.py
        *TASKS,  # in tests/training/test_shipped_recipes.py
        *("small", "medium", "gpt2", "home", "slow-links"),  # `swarm init` fills them, in tests/cli/test_init.py
    }
