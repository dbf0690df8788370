"""A script trains a task of its own, which no recipe names."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from swarmcli.errors import RecipeError
from swarmcli.peer.collaboration import Collaboration
from swarmcli.peer.home import Home
from swarmcli.peer.joining import join_run
from swarmcli.peer.lifetime import run_trainer
from swarmcli.recipe import Recipe
from swarmcli.run.watch import RunWatch
from swarmcli.training import build_task
from tests.peer.roles import Sums
from tests.training.small_tasks import small


def custom(directory: Path, *overrides: str) -> Recipe:
    own = ("local.host=127.0.0.1", "base_model={model_type: sums}", "task=custom", "max_epochs=2")
    return small(directory, *own, *overrides)


def test_a_script_hands_its_task_to_the_trainer(tmp_path: Path) -> None:
    task: Any = Sums()
    with Home.at(tmp_path / "home") as home, join_run(custom(tmp_path), "trainer", home) as peer:
        watch = RunWatch(peer)
        try:
            result = run_trainer(peer, watch, threading.Event(), task=task)
        finally:
            watch.close()
    assert (result.reason, result.epoch) == ("max_epochs", 2)


def test_recipe_and_script_have_to_agree_on_whose_task_it_is_and_what_it_can(tmp_path: Path) -> None:
    task: Any = Sums()
    for override, words in (
        ("task=causal_lm", r"the recipe names causal_lm, and this script .*; write `task: custom`"),
        ("label_smoothing_factor=0.1", r"label_smoothing_factor: the loss of Sums is its own affair, and .*; remove"),
    ):
        with (
            Home.at(tmp_path / override) as home,
            join_run(custom(tmp_path, override), "trainer", home) as peer,
            pytest.raises(RecipeError, match=words),
        ):
            Collaboration(peer, task=task)
    with pytest.raises(RecipeError, match="the task of this recipe comes with a script"):
        build_task(custom(tmp_path))
